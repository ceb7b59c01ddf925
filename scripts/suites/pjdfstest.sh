#!/bin/bash
# pjdfstest.sh SOURCES: tests POSIX conformance of each file system call.
set -u
. "$(dirname "$0")/checks.sh"

printf '%s\n' '[features]' 'posix_fallocate = {}' 'rename_ctime = {}' 'utimensat = {}' 'utime_now = {}' '[settings]' \
    'naptime = 0.05' 'allow_remount = false' '[dummy_auth]' 'entries = [["nobody", "nogroup"], ["games", "games"]]' \
    >/tmp/pjdfstest.toml
chmod 777 .
timeout 600 "$1/pjdfstest/bin/pjdfstest" -c /tmp/pjdfstest.toml -p "$PWD" >/tmp/suite-pjdfstest 2>&1
ended pjdfstest $? "$(sed -nE 's/^([a-z_0-9]+::[a-z_0-9:]+) +ok$/ok \1/p; s/^([a-z_0-9]+::[a-z_0-9:]+) +FAILED$/not ok \1/p' /tmp/suite-pjdfstest)"
grep -A1 -E " FAILED\$" /tmp/suite-pjdfstest || true
