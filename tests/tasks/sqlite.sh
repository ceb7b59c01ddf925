# Databases: in a file with a rollback journal, in memory, several writers one after the other under locks. Without the
# write-ahead log, whose index is shared memory.
set -u
rows=${1:-20000}
make_statements() {
    echo "PRAGMA journal_mode=$1; CREATE TABLE t(id INTEGER PRIMARY KEY, k INTEGER, v TEXT); BEGIN;"
    awk -v n="$rows" 'BEGIN { s = 7; for (i = 0; i < n; i++) { s = (s * 16807) % 2147483647; printf "INSERT INTO t VALUES(%d,%d,\"v%d\");\n", i, s % 1000, s % 9973 } }' | tr '"' "'"
    cat <<'END'
COMMIT; CREATE INDEX tk ON t(k); ANALYZE;
SELECT count(*), sum(k), min(v), max(v) FROM t;
SELECT k, count(*) c FROM t GROUP BY k ORDER BY c DESC, k LIMIT 5;
UPDATE t SET v = v || '-x' WHERE k % 7 = 0; DELETE FROM t WHERE k % 11 = 0;
WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 60000) SELECT sum(n * n % 97) FROM c;
SELECT count(*) FROM t a JOIN t b ON a.k = b.k WHERE a.id < 400;
PRAGMA integrity_check; VACUUM; PRAGMA page_count;
END
}
for mode in delete truncate persist memory off; do
    make_statements $mode | sqlite3 "$mode.db" || exit
done
make_statements memory | sqlite3 :memory:
echo 'SELECT id, v FROM t ORDER BY v, id LIMIT 3' | sqlite3 -csv delete.db
sqlite3 delete.db .dump | sha256sum
sqlite3 copy.db ".restore delete.db" && sqlite3 copy.db .dump | sha256sum
sqlite3 queue.db 'CREATE TABLE q(n INTEGER)'
for w in 1 2 3; do
    (for ((i = 0; i < 25; i++)); do sqlite3 -cmd '.timeout 60000' queue.db "INSERT INTO q VALUES($w)" || echo "writer $w failed"; done) &
done
wait
sqlite3 queue.db 'SELECT n, count(*) FROM q GROUP BY n; PRAGMA integrity_check'
# The content of the persistent journal is random.
rm queue.db persist.db-journal
