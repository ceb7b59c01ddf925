# Common programs at work in the directory that is the first argument, from a repository to a mailbox: the output must be
# the same on the disk and through /mfs. Times, places and sizes that differ by nature are left out.
set -u
cd "$1" || exit 1
export LC_ALL=C TZ=UTC HOME=$PWD PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0
export GIT_CONFIG_NOSYSTEM=1 GIT_AUTHOR_DATE='2020-01-01 00:00 +0000' GIT_COMMITTER_DATE='2020-01-01 00:00 +0000'
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b

say() { echo "== $*"; }
run() { "$@" 2>&1 | sed "s|$PWD|HERE|g"; echo "$1: ${PIPESTATUS[0]}"; }
# The content of a directory: kinds, rights, links, sizes, content.
tree() {
    (cd "$1" && find . -type f -printf '%P %M %n %s\n' -o -type l -printf '%P -> %l\n' -o -printf '%P %M\n' | sort
     find . -type f -exec cksum {} + | sort)
}

say git
mkdir project
for i in $(seq 40); do seq "$i" $((i * 50)) > "project/file$i"; done
ln -s file1 project/link
chmod +x project/file2
(cd project && run git init -q -b main && run git add . && run git commit -q -m one && run git status --short
 echo more >> file3; git mv file4 dir4; rm file5; echo new > file6
 run git status --short; run git diff --stat; run git commit -q -a -m two; run git rev-parse HEAD
 run git checkout -q -b side HEAD~1; echo side > file7; run git commit -q -a -m three; run git merge -q -m merged main
 run git stash list; run git gc -q --prune=now; run git fsck --no-progress; run git status --short; run git log --format=%H)
run git clone -q project copy
run git clone -q "file://$PWD/project" wire
(cd copy && run git fsck --no-progress && run git log --format=%s && run git status --short)
(cd wire && run git status --short && run git worktree add -q ../tree main && run git worktree list --porcelain | grep branch)
tree tree | grep -v '\.git'

say make
mkdir build
cat > build/Makefile <<'END'
CFLAGS = -O1 -MMD
program: one.o two.o three.o lib.a
	$(CC) -o $@ one.o two.o three.o lib.a
lib.a: four.o five.o
	$(AR) rcs $@ $?
-include *.d
END
for name in two three four five; do
    printf '#include "all.h"\nint %s(void) { return NUMBER; }\n' $name > build/$name.c
    echo "int $name(void);" >> build/all.h
done
echo '#define NUMBER 5' >> build/all.h
printf '#include "all.h"\nint main(void) { return two() + three() + four() + five(); }\n' > build/one.c
(cd build && run make -s; run make -q; run ./program; run make
 # A change is noticed, and files built after it are newer than it.
 sed -i 's/5/6/' all.h; run make -q; run make -s; run make -q; run ./program
 echo '// more' >> two.c; run make; run make -j3 -s -B; run make -q)

say archives
mkdir -p mixed/deep/er; cp -r build mixed/age
seq 9999 > mixed/long; ln mixed/long mixed/deep/hard; ln -s ../long mixed/deep/soft; mkfifo mixed/pipe
truncate -s 3M mixed/sparse; printf end >> mixed/sparse; printf middle | dd of=mixed/sparse bs=1 seek=1000000 conv=notrunc status=none
touch -d '1999-12-31 23:59:59.123456789' mixed/long; chmod 2750 mixed/deep; chmod 444 mixed/age/*
touch -d '2001-02-03' mixed/deep
mkdir out; run tar -cSf mixed.tar mixed; run tar -xpf mixed.tar -C out; run tar --compare -f mixed.tar; run tar --compare -f mixed.tar -C out
tar -czf mixed.tgz mixed; (cd out && rm -r mixed && run tar -xzf ../mixed.tgz && run diff -r --no-dereference -x pipe ../mixed mixed)
run cp -a mixed again; tree again; run diff -r --no-dereference -x pipe mixed again; stat -c '%n %Y %y' again/long again/deep
run cp --sparse=always mixed/sparse holes; [ "$(stat -c %b holes)" -lt 2000 ] && echo sparse
run cp --reflink=auto mixed/long plain; run cmp plain mixed/long
run rsync -aHS --checksum mixed/ synced/; run rsync -aHS --checksum -i mixed/ synced/; echo changed > synced/long
run rsync -aHS --checksum --inplace mixed/ synced/; cmp synced/long mixed/long; rm mixed/sparse; run rsync -aHS --delete mixed/ synced/; tree synced
run mv mixed/deep moved; run rm -r again synced; run find moved -newer build/one.c; run find . -maxdepth 1 -empty

say tools
seq 20000 | sort -R --random-source=/etc/passwd > lines; run sort -n -o lines lines; cksum < lines; run sort -nc lines
run split -l 3000 lines part-; cat part-* | cmp - lines; run sed -i 's/^7/x/' lines; grep -c x lines
run perl -i.bak -pe 's/x/7/' lines; run cmp lines lines.bak; run ln -sfn lines to; run ln -sfn plain to; readlink to
run install -D -m 640 lines sub/dir/lines; stat -c '%A %s' sub/dir/lines; run gzip -k lines; run gzip -t lines.gz; run truncate -s 10 lines
for i in 1 2 3; do echo "saved $i" > .save.tmp && mv .save.tmp save; cat save; done
(umask 077; run mktemp -q tmp.XXXXXXXX | tail -1; stat -c %A tmp.*); run dd if=plain of=padded bs=4096 conv=sync,fsync status=none; wc -c < padded
exec 3<> both; echo here >&3; cat both; exec 3>&-; echo "$(< both)" >> both; run sh -c 'set -C; echo no > both'; run cat both
run shuf -n 0 plain; run tee -a both < save; run touch -r plain both; [ ! both -nt plain ] && [ ! both -ot plain ] && echo same time

say sqlite
for mode in delete truncate persist wal; do
    for _ in 1 2; do
        run sqlite3 -bail $mode.db "pragma journal_mode = $mode; create table if not exists t (n integer primary key, text);
            with recursive c(x) as (select 1 union all select x + 1 from c where x < 500) insert into t(text) select hex(x) from c;
            begin; delete from t where n % 3 = 0; rollback; update t set text = text || 'x' where n % 7 = 0; vacuum;
            select count(*), sum(length(text)) from t; pragma integrity_check"
    done
    run sqlite3 $mode.db 'pragma integrity_check; select count(*) from t'
done

say python
run /usr/bin/python3 - <<'END'
import dbm.dumb, mailbox, mmap, os, pathlib, pickle, shelve, shutil, sqlite3, tempfile, zipfile
for kind in (mailbox.mbox, mailbox.Maildir, mailbox.MH):
    box = kind("mail-" + kind.__name__)
    for number in range(5):
        box.lock()
        key = box.add(f"Subject: {number}\n\nbody {number}\n")
        box.flush()
        box.unlock()
    box.remove(key)
    box.flush()
    print(kind.__name__, sorted(message["subject"] for message in box))
    box.close()
for round_ in range(3):
    with shelve.open("shelf") as shelf, dbm.dumb.open("dumb", "c") as dumb:
        shelf[str(round_)] = list(range(round_))
        dumb[str(round_)] = str(round_)
        print(sorted(shelf), sorted(dumb.keys()))
with tempfile.TemporaryDirectory(dir=".") as place, tempfile.NamedTemporaryFile(dir=place) as file, tempfile.TemporaryFile(dir=place) as nameless:
    file.write(b"x" * 100000), nameless.write(b"y" * 100000)
    file.flush(), nameless.flush()
    print(os.path.getsize(file.name), os.fstat(nameless.fileno()).st_size)
with zipfile.ZipFile("zip", "a") as archive:
    archive.write("plain"), archive.writestr("other", b"z" * 9999)
print(zipfile.ZipFile("zip").testzip())
with open("grown", "w+b") as file:
    file.write(b"x" * 9000)
for round_ in range(2):
    try:
        with open("grown", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            mapped[round_:round_ + 1] = b"y"
        print("mapped again:", open("grown", "rb").read()[:3])
    except OSError as error:
        print("mapped again:", error)
try:
    one, two = (sqlite3.connect("two.db", isolation_level=None) for _ in range(2))
    print("two in wal:", one.execute("pragma journal_mode = wal").fetchall(), one.execute("create table t (n)").fetchall())
    for base in (one, two, one, two):
        base.execute("insert into t values (1)")
        print("two in wal:", one.execute("select count(*) from t").fetchall(), two.execute("select count(*) from t").fetchall())
    one.close(), two.close()
except sqlite3.Error as error:
    print("two in wal:", error)
shutil.copytree("build", "build2")
print(sorted(path.name for path in pathlib.Path("build2").rglob("*.c")), shutil.rmtree("build2"))
END
say left
find . -maxdepth 1 ! -name 'two.db-*' | sort | sed 's/tmp\..*/tmp/'
