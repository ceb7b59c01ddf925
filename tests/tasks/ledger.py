"""ledger.py DATABASE WHO TIMES MODE: makes entries in a database that other processes update as well, and reads it.

MODE is that of the journal.
"""
import sqlite3
import sys

place, who, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
base = sqlite3.connect(place, timeout=60, isolation_level=None)
base.execute(f"pragma journal_mode = {sys.argv[4]}")
base.execute("create table if not exists booked (who, number, before)")
for number in range(times):
    base.execute("begin immediate")
    (before,) = base.execute("select count(*) from booked").fetchone()
    base.execute("insert into booked values (?, ?, ?)", (who, number, before))
    if number % 5 == 4:
        base.execute("insert into booked values ('nobody', 0, 0)")
        base.execute("rollback")
    else:
        base.execute("commit")
    (own,) = base.execute("select count(*) from booked where who = ?", (who,)).fetchone()
    assert own == number + 1 - (number + 1) // 5, (own, number)
print("booked")
