"""Required behaviour of a file system, in the directory of its first argument: each line has a call and its result.

The output must be the same on the disk and through /mfs, for every user; names, numbers and times that differ by nature
are left out.
"""
import errno
import fcntl
import mmap
import os
import random
import stat
import sys

os.chdir(sys.argv[1])


def report(what, *outcome):
    print(what, *outcome, flush=True)


def attempt(what, call, *arguments, **words):
    """Prints what a call returned, or its error."""
    try:
        result = call(*arguments, **words)
    except OSError as error:
        report(what, errno.errorcode[error.errno])
        return None
    report(what, "" if isinstance(result, os.stat_result) else result)
    return result


def write(name, data, flags=os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode=0o644):
    file = os.open(name, flags, mode)
    os.write(file, data)
    os.close(file)


def read(name):
    with open(name, "rb") as file:
        return file.read()


def like(name):
    """Those attributes of a file that can be compared."""
    is_ = os.lstat(name)
    return (stat.filemode(is_.st_mode), is_.st_nlink if not stat.S_ISDIR(is_.st_mode) else "", is_.st_size
            if stat.S_ISREG(is_.st_mode) else "")


os.umask(0o022)

# Files: created, read, written, appended, truncated, grown.
write("a", b"hello")
report("read", read("a"))
attempt("exclusive", os.open, "a", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
attempt("none", os.open, "none", os.O_RDONLY)
attempt("below a file", os.open, "a/b", os.O_RDONLY)
attempt("directory for writing", os.open, ".", os.O_WRONLY)
attempt("not a directory", os.open, "a", os.O_RDONLY | os.O_DIRECTORY)
attempt("long name", os.open, "n" * 256, os.O_CREAT | os.O_WRONLY)
file = os.open("a", os.O_RDWR)
report("pread", os.pread(file, 3, 1), os.pread(file, 9, 5), os.pread(file, 9, 500))
report("pwrite beyond", os.pwrite(file, b"far", 10), read("a"))
attempt("truncate", os.ftruncate, file, 2)
report("size", os.fstat(file).st_size, read("a"))
attempt("grow", os.ftruncate, file, 4)
report("grown", read("a"))
attempt("seek", os.lseek, file, -1, os.SEEK_END)
report("at", os.read(file, 5))
attempt("read-only write", os.write, os.open("a", os.O_RDONLY), b"x")
attempt("write-only read", os.read, os.open("a", os.O_WRONLY), 1)
os.close(file)
one, other = (os.open("a", os.O_WRONLY | os.O_APPEND) for _ in range(2))
for number in range(4):
    os.write(one, b"1%d" % number)
    os.write(other, b"2%d" % number)
report("appended", read("a"))
os.close(one)
os.close(other)
write("a", b"new")
report("truncated by open", read("a"))
report("empty write", os.write(os.open("a", os.O_WRONLY), b""))

# Names.
attempt("link", os.link, "a", "b")
report("links", like("a"), os.stat("a").st_ino == os.stat("b").st_ino, os.path.samefile("a", "b"))
attempt("link over", os.link, "a", "b")
attempt("rename", os.rename, "b", "c")
attempt("rename to itself", os.rename, "a", "c")
report("still", sorted(os.listdir(".")))
attempt("unlink", os.unlink, "c")
attempt("unlink again", os.unlink, "c")
attempt("unlink of a directory", os.unlink, ".")
os.mkdir("d")
attempt("mkdir over", os.mkdir, "d")
attempt("mkdir below nothing", os.mkdir, "x/y")
write("d/f", b"1")
attempt("rmdir of one that is full", os.rmdir, "d")
attempt("rename over a full directory", os.rename, os.mkdir("e") or "e", "d")
attempt("rename into itself", os.rename, "d", "d/g")
attempt("file over directory", os.rename, "a", "d")
attempt("directory over file", os.rename, "d", "a")
attempt("rmdir", os.rmdir, "e")
write("over", b"old")
kept = os.open("over", os.O_RDONLY)
write("fresh", b"newer")
attempt("rename over", os.rename, "fresh", "over")
report("old one open", os.read(kept, 9), os.fstat(kept).st_nlink, "new one", read("over"))
os.unlink("over")
report("still open", os.pread(kept, 9, 0))
os.close(kept)
file = os.open("gone", os.O_RDWR | os.O_CREAT)
os.unlink("gone")
report("unlinked, written", os.write(file, b"ghost"), os.pread(file, 9, 0), os.fstat(file).st_nlink)
os.close(file)
attempt("symlink", os.symlink, "a", "s")
report("symlink", os.readlink("s"), read("s"), like("s"))
attempt("symlink over", os.symlink, "a", "s")
attempt("readlink of a file", os.readlink, "a")
os.symlink("s1", "s2")
os.symlink("s2", "s1")
attempt("loop", os.open, "s1", os.O_RDONLY)
attempt("not followed", os.open, "s", os.O_RDONLY | os.O_NOFOLLOW)
os.symlink("nowhere", "dangling")
attempt("dangling", os.open, "dangling", os.O_RDONLY)
write("dangling", b"made through it")
report("made", read("nowhere"))
os.mkfifo("pipe")
report("fifo", like("pipe"))
attempt("device", os.mknod, "null", 0o600 | stat.S_IFCHR, os.makedev(1, 3)) if os.geteuid() else None

# Directories.
os.mkdir("many")
names = [f"{number:04}-" + "n" * (number % 50) for number in range(1500)]
for name in names:
    write("many/" + name, b"")
report("listed", sorted(os.listdir("many")) == names, len(set(os.listdir("many"))))
with os.scandir("many") as entries:
    report("kinds", {entry.is_file(follow_symlinks=False) for entry in entries})
with os.scandir("many") as entries:
    numbers = {entry.name: entry.inode() for entry in entries}
report("numbers", all(os.stat("many/" + name).st_ino == numbers[name] for name in names[::100]))
for name in names:
    os.unlink("many/" + name)
report("empty", os.listdir("many"))
os.rmdir("many")
os.makedirs("deep/" + "/".join("abcdefghij"))
write("deep/" + "/".join("abcdefghij") + "/x", b"deep")
report("walked", sum(len(files) for _, _, files in os.walk("deep")))

# Attributes.
attempt("chmod", os.chmod, "a", 0o4751)
report("mode", like("a"))
attempt("utime", os.utime, "a", ns=(1_000_000_001, 2_000_000_002))
report("times", os.stat("a").st_atime_ns, os.stat("a").st_mtime_ns)
attempt("before 1970", os.utime, "a", ns=(-1_500_000_000, -1))
report("times", os.stat("a").st_atime_ns, os.stat("a").st_mtime_ns)
before = os.stat("a").st_mtime_ns
write("a", b"again")
report("time of writing", os.stat("a").st_mtime_ns > before)
attempt("chown to oneself", os.chown, "a", os.geteuid(), os.getegid())
attempt("chown to root", os.chown, "a", 0, 0)
attempt("attribute", os.setxattr, "a", "user.colour", b"green")
report("attributes", [name for name in os.listxattr("a") if name.startswith("user.")])
attempt("value", os.getxattr, "a", "user.colour")
attempt("replace none", os.setxattr, "a", "user.none", b"", os.XATTR_REPLACE)
attempt("no value", os.getxattr, "a", "user.none")
attempt("remove", os.removexattr, "a", "user.colour")
attempt("access", os.access, "a", os.R_OK | os.W_OK)
space = os.statvfs(".")
report("space", space.f_blocks > 0, space.f_namemax)

# Holes, allocation, copies, maps.
file = os.open("sparse", os.O_RDWR | os.O_CREAT)
os.pwrite(file, b"end", 1 << 20)
report("sparse", os.fstat(file).st_size, os.fstat(file).st_blocks < 100)
attempt("data", os.lseek, file, 0, os.SEEK_DATA)
attempt("hole", os.lseek, file, 0, os.SEEK_HOLE)
attempt("no data", os.lseek, file, 2 << 20, os.SEEK_DATA)
attempt("room", os.posix_fallocate, file, 0, 2 << 20)
report("room", os.fstat(file).st_size)
report("copied", os.copy_file_range(file, os.open("copy", os.O_WRONLY | os.O_CREAT), 9, 1 << 20, 0), read("copy")[:3])
with mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
    mapped[0:3] = b"own"
    report("mapped", mapped[1 << 20:][:3], mapped[:3], os.pread(file, 3, 0))
attempt("fsync", os.fsync, file)
attempt("fdatasync", os.fdatasync, file)
directory = os.open(".", os.O_RDONLY)
attempt("fsync of a directory", os.fsync, directory)
report("at", os.stat("a", dir_fd=directory).st_size)
os.close(file)

# Record locks.
file = os.open("locked", os.O_RDWR | os.O_CREAT)
fcntl.lockf(file, fcntl.LOCK_EX, 10, 5)


def in_a_child(call):
    child = os.fork()
    if child == 0:
        try:
            call()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return errno.errorcode.get(status, "granted")


def lock(start, length, kind=fcntl.LOCK_EX | fcntl.LOCK_NB):
    return lambda: fcntl.lockf(os.open("locked", os.O_RDWR), kind, length, start)


report("locks", in_a_child(lock(5, 1)), in_a_child(lock(14, 1)), in_a_child(lock(15, 1)), in_a_child(lock(0, 5)))
fcntl.lockf(file, fcntl.LOCK_SH, 10, 5)
report("shared", in_a_child(lock(5, 1, fcntl.LOCK_SH | fcntl.LOCK_NB)), in_a_child(lock(5, 1)))
os.close(os.open("locked", os.O_RDONLY))
report("gone with any close", in_a_child(lock(5, 1)))
fcntl.lockf(file, fcntl.LOCK_EX)
waiting = os.fork()
if waiting == 0:
    fcntl.lockf(os.open("locked", os.O_RDWR), fcntl.LOCK_EX)
    os._exit(7)
fcntl.lockf(file, fcntl.LOCK_UN)
report("waited", os.waitstatus_to_exitcode(os.waitpid(waiting, 0)[1]))
fcntl.flock(file, fcntl.LOCK_EX)
report("flock", in_a_child(lambda: fcntl.flock(os.open("locked", os.O_RDWR), fcntl.LOCK_SH | fcntl.LOCK_NB)))

# Random operations, compared with a model.
chance = random.Random(5)
model = bytearray()
file = os.open("random", os.O_RDWR | os.O_CREAT)
for step in range(600):
    at, length = chance.randrange(300_000), chance.randrange(1, 70_000)
    match chance.randrange(6):
        case 0 | 1:
            data = chance.randbytes(length)
            if len(model) < at:
                model.extend(bytes(at - len(model)))
            model[at:at + length] = data
            assert os.pwrite(file, data, at) == length
        case 2:
            os.ftruncate(file, at)
            model = model[:at] + bytes(max(at - len(model), 0))
        case 3:
            os.close(file)
            file = os.open("random", os.O_RDWR)
        case _:
            assert os.pread(file, length, at) == model[at:at + length], step
    assert os.fstat(file).st_size == len(model), step
report("random", read("random") == model)
report("left", sorted(os.listdir(".")))
