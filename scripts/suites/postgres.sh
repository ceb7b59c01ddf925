#!/bin/bash
# postgres.sh SOURCES: runs PostgreSQL's regression tests, and tests its recovery after an immediate
# stop under load.
set -u
here=$(cd "$(dirname "$0")" && pwd)

if ((EUID == 0)); then
    # PostgreSQL refuses to run as root, and the user nobody cannot read all folders.
    rm -rf /tmp/suite-postgres
    mkdir /tmp/suite-postgres
    cp -a "$1/postgresql-15/installed" "$1/postgresql-15/src/test/regress" "$here" /tmp/suite-postgres/
    chown -R nobody /tmp/suite-postgres .
    exec setpriv --reuid nobody --regid nogroup --clear-groups bash "/tmp/suite-postgres/${here##*/}/postgres.sh" "$1"
fi

. "$here/checks.sh"
made=/tmp/suite-postgres regress=/tmp/suite-postgres/regress
export PATH=$made/installed/usr/local/pgsql/bin:$PATH LD_LIBRARY_PATH=$made/installed/usr/local/pgsql/lib
export PGHOST=/tmp PGPORT=5499 PGUSER=postgres LC_ALL=C HOME=$PWD
data=$PWD/data

check "initdb" initdb -D "$data" -U postgres -A trust --no-instructions
printf '%s\n' "unix_socket_directories = '/tmp'" "listen_addresses = ''" "port = $PGPORT" "max_connections = 60" \
    >>"$data/postgresql.conf"
# Output goes to a file: a background process must not keep the pipe open that is read here.
start() { pg_ctl -w -t 120 -D "$data" -l "$PWD/log" start >pg_ctl.log 2>&1; }
check "start" start

mkdir out
timeout 900 "$regress/pg_regress" --inputdir="$regress" --outputdir="$PWD/out" --dlpath="$regress" \
    --bindir="$made/installed/usr/local/pgsql/bin" --host=/tmp --port=$PGPORT --user=postgres \
    --schedule="$regress/parallel_schedule" --max-concurrent-tests=20 >regress.log 2>&1 </dev/null
ended regress $? "$(sed -nE 's/^(test)? +([a-z0-9_.-]+) +\.\.\. ok.*/ok regress: \2/p; s/^(test)? +([a-z0-9_.-]+) +\.\.\. FAILED.*/not ok regress: \2/p' regress.log)"

createdb bench
check "pgbench -i" pgbench -q -i -s 5 bench
psql -qc 'create extension amcheck' bench
# After each recovery, all acknowledged transactions must be present, and pgbench's invariant sums
# must be equal.
told() { # Number of transactions that were acknowledged to a client.
    cat told.* 2>/dev/null | wc -l
}
sums="select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history)
    and (select sum(tbalance) from pgbench_tellers) = (select sum(bbalance) from pgbench_branches)"
for turn in 1 2 3; do
    (cd "$PWD" && exec pgbench -n -c4 -j2 -T 60 --log --log-prefix="$PWD/told" bench >pgbench.log 2>&1) &
    sleep 8
    pg_ctl -D "$data" -m immediate stop >pg_ctl.log 2>&1
    wait
    check "recovery $turn" start
    check "sums $turn" test "$(psql -Atc "$sums" bench)" = t
    done=$(psql -Atc 'select count(*) from pgbench_history' bench)
    echo "turn $turn: $done done, $(told) told"
    check "nothing lost $turn" test "$done" -ge "$(told)"
done
check "pg_amcheck" pg_amcheck --heapallindexed -d bench
check "no complaint in the log" bash -c '! grep -E "PANIC|could not (fsync|read|write)|invalid page" log'
check "stop" pg_ctl -D "$data" -m fast stop
