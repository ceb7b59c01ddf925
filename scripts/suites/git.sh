#!/bin/bash
# git.sh SOURCES: runs some of git's own test files.
set -u
. "$(dirname "$0")/checks.sh"

TESTS=${TERN_GIT:-t0001 t0003 t0005 t0006 t0008 t0020 t0021 t0050 t0060 t0090 t1001 t1006 t1007 t1400 t1404 t1410}
root=$PWD
cd "$1/git/t" || exit

one() { # TEST
    local out=/tmp/suite-git-$1
    mkdir -p "$out"
    TEST_OUTPUT_DIRECTORY=$out timeout 600 bash ./"$1"-*.sh --root="$root/$1" </dev/null >"$out/said" 2>&1
    local status=$?
    # Skipped tests and known failures are not counted.
    ended "$1" $status "$(sed -n "/# TOD[O] known\|# skip/d; s/^ok [0-9]* - /ok $1: /p; s/^not ok [0-9]* - /not ok $1: /p" "$out/said")"
}
export -f one ended
export root
echo "$TESTS" | tr ' ' '\n' | xargs -P2 -I{} bash -c 'said=$(one {}); echo "$said"'
