#!/bin/bash
# sqlite.sh SOURCES: runs SQLite's own file tests, except a few that take minutes each, and busy2,
# which depends on the clock.
set -u
. "$(dirname "$0")/checks.sh"

TESTS=${TERN_SQLITE:-lock lock2 lock3 lock4 lock5 lock6 lock7 exclusive exclusive2 journal1 journal2 journal3 jrnlmode jrnlmode2
    jrnlmode3 pager3 pager4 wal wal2 wal4 wal5 wal6 wal7 wal8 wal9 walbak walblock walcksum walhook walmode walnoshm
    walpersist walprotocol walro walro2 walshared walsetlk mmap1 mmap2 mmap3 mmapwarm io attach attach2 attach3 backup2
    backup4 backup5 busy capi3 crash8 delete_db dbstatus filectrl hook incrblob incrvacuum insert multiplex2 nolock
    notify1 oserror openv2 quota rollback savepoint shared shared2 shared3 shmlock stmt superlock symlink symlink2 sync
    sync2 tempdb temptable thread003 unixexcl uri vacuum vacuum2 vacuum-into zerodamage}

for name in $TESTS; do
    mkdir "$name"
    cd "$name" || exit
    timeout 120 "$1/sqlite3/testfixture" "$1/sqlite3/test/$name.test" >/tmp/suite-sqlite 2>&1 </dev/null
    status=$?
    ended "$name" $status "$(sed -n 's/^\(.*\)\.\.\. Ok$/ok \1/p; s/^! \([^ ]*\) expected:.*/not ok \1/p; / errors out of /p' /tmp/suite-sqlite)"
    cd ..
    rm -rf "$name"
done
