#!/bin/bash
# build.sh SOURCES: runs git on a repository of two projects, builds them and runs their own tests.
set -u
. "$(dirname "$0")/checks.sh"

export GIT_AUTHOR_NAME=n GIT_AUTHOR_EMAIL=e GIT_COMMITTER_NAME=n GIT_COMMITTER_EMAIL=e HOME=$PWD
mkdir origin
cp -a "$1/zlib" "$1/xz-utils" origin/
check "git init" git -C origin init -q
check "git add" git -C origin add -A -f
check "git commit" git -C origin commit -q -m all
check "git clone" git clone -q --no-local origin clone
status() { [[ $(git -C clone status --porcelain) == "$1" ]]; }
check "git status: clean" status ""
echo >> clone/zlib/zlib.h
check "git status: a change" status " M zlib/zlib.h"
check "git stash" git -C clone stash -q
check "git status: clean again" status ""
check "git gc" git -C clone gc -q
check "git fsck" git -C clone fsck --full
check "the same files" diff -r --exclude=.git origin clone

cd clone/zlib || exit
check "zlib: configure" ./configure
check "zlib: make" make -j2
check "zlib: make test" make test
# Not from the clone: git does not preserve times, so make would rebuild generated files that are in
# the repository.
cd ../../origin/xz-utils || exit
check "xz: configure" ./configure --disable-nls --disable-doc
check "xz: make" make -j2
make check 2>&1 | sed -n 's/^PASS: /ok xz: /p; s/^FAIL: /not ok xz: /p; s/^ERROR: /not ok xz: /p'
