"""What POSIX and Linux specify for each call on files, tried in the directory that is the first argument, as root and as other users.

Each line has a call and its outcome; the lines must be the same on the disk and through /mfs.
"""
import ctypes
import errno
import os
import socket
import stat
import struct
import sys

os.chdir(sys.argv[1])
os.umask(0)
C = ctypes.CDLL(None, use_errno=True)
OWNER, OTHER, MEMBER = (1234, 1234, []), (999, 999, [77]), (999, 999, [4321])
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2


def outcome(call, *arguments, **words):
    try:
        result = call(*arguments, **words)
    except OSError as error:
        return errno.errorcode[error.errno]
    if call is os.open:
        os.close(result)
        return "opened"
    return "" if result is None or isinstance(result, os.stat_result) else result


def report(what, *outcomes):
    print(what, *outcomes, flush=True)


def attempt(what, call, *arguments, **words):
    report(f"{what}:", outcome(call, *arguments, **words))


def sub(who, work):
    """Does something in a child with another identity."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        uid, gid, groups = who
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        try:
            work()
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(child, 0)


def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def renameat2(old, new, flags):
    checked(C.renameat2(-100, old.encode(), -100, new.encode(), flags))


def file(name, mode=0o644, content=b"text"):
    handle = os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, mode)
    os.write(handle, content)
    os.close(handle)
    os.chmod(name, mode)


def folder(name, mode=0o755):
    os.mkdir(name)
    os.chmod(name, mode)


def mode(name):
    return stat.filemode(os.lstat(name).st_mode)


def owner(name):
    is_ = os.lstat(name)
    return is_.st_uid, is_.st_gid


# One of each kind.
KINDS = {"none": None, "f": file, "d": folder, "full": lambda name: (folder(name), file(name + "/in")),
         "p": os.mkfifo, "s": lambda name: socket.socket(socket.AF_UNIX).bind(name),
         "l": lambda name: os.symlink("f", name), "ld": lambda name: os.symlink("d", name),
         "dangling": lambda name: os.symlink("nowhere", name), "loop": lambda name: os.symlink("loop", name)}


def removed(name):
    if os.path.isdir(name) and not os.path.islink(name):
        for inside in os.listdir(name):
            removed(f"{name}/{inside}")
        os.rmdir(name)
    elif os.path.lexists(name):
        os.unlink(name)


# The paths that the last operation may have changed.
used = set()


def use(path):
    """Records the file that a path begins with, and the targets of links."""
    first = path.split("/")[0]
    used.update({first.removesuffix("2"), "f", "d"} if first[:1] != "l" and ".." not in path else KINDS)


def fresh():
    for kind in used & KINDS.keys():
        for name in (kind, kind + "2"):
            removed(name)
            if KINDS[kind]:
                KINDS[kind](name)
    used.clear()


def tried(what, call, *arguments):
    """As attempt, among files of all kinds."""
    fresh()
    result = outcome(call, *arguments)
    report(f"{what}:", result)
    # A failed call changes nothing, nor does a read.
    if result not in errno.errorcode.values() and what.split()[0] not in LOOKS:
        use(arguments[0])
        removed("nowhere")


LONG = "n" * 256
DEEP = "d/" * 2048 + "f"
ODD = [*KINDS, "f/x", "none/x", "d/none", "full/in", "l/x", "loop/x", "dangling/x", "ld/x", "p/x", "f/", "d/", "none/", "l/",
       "ld/", "f/.", "d/.", "d/..", "", LONG, "d/" + LONG, DEEP, "full/../f", "f/../f"]
OPENS = {"r": os.O_RDONLY, "w": os.O_WRONLY, "rw": os.O_RDWR, "dir": os.O_DIRECTORY, "nofollow": os.O_NOFOLLOW,
         "path": os.O_PATH, "path nofollow": os.O_PATH | os.O_NOFOLLOW, "create": os.O_CREAT | os.O_WRONLY,
         "exclusive": os.O_CREAT | os.O_EXCL | os.O_RDWR, "truncate": os.O_TRUNC | os.O_WRONLY,
         "create dir": os.O_CREAT | os.O_DIRECTORY, "append": os.O_APPEND | os.O_WRONLY,
         "exclusive nofollow": os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY, "create read": os.O_CREAT | os.O_RDONLY}
CALLS = {"stat": os.stat, "lstat": os.lstat, "unlink": os.unlink, "rmdir": os.rmdir, "mkdir": os.mkdir,
         "mkfifo": os.mkfifo, "readlink": os.readlink, "listdir": lambda p: sorted(os.listdir(p)), "chdir": lambda p: (os.chdir(p), os.chdir(sys.argv[1]))[0],
         "truncate": lambda p: os.truncate(p, 2), "chmod": lambda p: os.chmod(p, 0o700), "chown": lambda p: os.chown(p, 5, 6),
         "lchown": lambda p: os.lchown(p, 5, 6), "utime": lambda p: os.utime(p, (5, 6)),
         "lutime": lambda p: os.utime(p, (5, 6), follow_symlinks=False), "access": lambda p: os.access(p, os.F_OK),
         "symlink": lambda p: os.symlink("f", p), "mknod": lambda p: os.mknod(p, stat.S_IFREG | 0o600),
         "getxattr": lambda p: os.getxattr(p, "user.none"), "setxattr": lambda p: os.setxattr(p, "user.a", b"1"),
         "statvfs": lambda p: os.statvfs(p) and None}

used.update(KINDS)
LOOKS = ("stat", "lstat", "readlink", "listdir", "chdir", "access", "getxattr", "statvfs")

# Each call and each way to open, with each kind of path.
for call, operation in CALLS.items():
    for odd in ODD:
        tried(f"{call} {odd[:20]}", operation, odd)
for how, flags in OPENS.items():
    for odd in ODD:
        if "p" not in (odd, odd.rstrip("/")) or "path" in how or "exclusive" in how:
            tried(f"open {how} {odd[:20]}", os.open, odd, flags | os.O_NONBLOCK, 0o600)

# Two names: from each kind to each kind, by rename and link.
for one in [*KINDS, "f/x", "d/.", ".", LONG]:
    for other in [*(kind + "2" for kind in KINDS), "f/y", "none/y", "d/y", LONG, "d2/.", one]:
        for call, operation in {"rename": os.rename, "link": lambda a, b: os.link(a, b, follow_symlinks=False),
                           "noreplace": lambda a, b: renameat2(a, b, RENAME_NOREPLACE),
                           "exchange": lambda a, b: renameat2(a, b, RENAME_EXCHANGE)}.items():
            fresh()
            result = outcome(operation, one, other)
            if not result:
                use(one)
                use(other)
            left = result or (os.path.lexists(one), os.path.lexists(other) and mode(other))
            report(f"{call} {one[:9]} {other[:9]}:", left)
used.update(KINDS)
fresh()
attempt("rename into itself", os.rename, "d", "d/d")
attempt("rename over its parent", os.rename, "full/in", "full")
attempt("link of a directory", os.link, "d", "d9")
attempt("long link", lambda: (os.symlink("x" * 4095, "longlink"), len(os.readlink("longlink")))[1])
attempt("too long a link", os.symlink, "x" * 4096, "toolong")
attempt("empty link", os.symlink, "", "emptylink")
attempt("longest name", lambda: (file("m" * 255), os.stat("m" * 255).st_size)[1])
attempt("odd bytes", lambda: (file(b"\xff \n\\"), os.path.exists(b"\xff \n\\"))[1])


# Which times a call changes: of the file, of its directory, of a file that it replaces.
def tick():
    """Waits until a change gets another time than all before it."""
    handle = os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.fchmod(handle, 0o600)
    begin = os.fstat(handle).st_ctime_ns
    while os.fstat(handle).st_ctime_ns <= begin:
        os.fchmod(handle, 0o600)
    os.close(handle)


def times(what, names, call):
    before = {name: os.lstat(name) for name in names if os.path.lexists(name)}
    tick()
    result = outcome(call)
    tick()
    changed = []
    for name in names:
        if os.path.lexists(name):
            is_, was = os.lstat(name), before.get(name)
            changed.append("new" if not was else ("m" if is_.st_mtime_ns != was.st_mtime_ns else "")
                           + ("c" if is_.st_ctime_ns != was.st_ctime_ns else ""))
        else:
            changed.append("gone")
    report(f"times of {what}:", result, *(f"{name}={change}" for name, change in zip(names, changed)))


def with_open(flags, call):
    def work():
        handle = os.open("t/f", flags)
        try:
            call(handle)
        finally:
            os.close(handle)
    return work


# Some of the operations above changed this directory.
os.chown(".", 0, 0)
os.chmod(".", 0o777)
os.mkdir("t")
file("t/f")
W = os.O_WRONLY
for what, call in {
    "nothing": lambda: None, "chmod": lambda: os.chmod("t/f", 0o600), "chown": lambda: os.chown("t/f", 0, 0),
    "chown nothing": lambda: os.chown("t/f", -1, -1), "utime": lambda: os.utime("t/f", (5, 6)), "read": with_open(0, lambda h: os.read(h, 3)),
    "write": with_open(W, lambda h: os.write(h, b"x")), "write nothing": with_open(W, lambda h: os.write(h, b"")),
    "pwrite": with_open(W, lambda h: os.pwrite(h, b"x", 9)), "ftruncate": with_open(W, lambda h: os.ftruncate(h, 3)),
    "ftruncate same": with_open(W, lambda h: os.ftruncate(h, 3)), "truncate": lambda: os.truncate("t/f", 2),
    "truncate same": lambda: os.truncate("t/f", 2), "open truncating": with_open(W | os.O_TRUNC, lambda h: None),
    "open truncating nothing": with_open(W | os.O_TRUNC, lambda h: None), "open creating": with_open(W | os.O_CREAT, lambda h: None),
    "fallocate": with_open(W, lambda h: os.posix_fallocate(h, 0, 9)), "setxattr": lambda: os.setxattr("t/f", "user.a", b"1"),
    "removexattr": lambda: os.removexattr("t/f", "user.a"), "link": lambda: os.link("t/f", "t/g"), "unlink": lambda: os.unlink("t/g"),
    "rename": lambda: os.rename("t/f", "t/g"), "rename back": lambda: os.rename("t/g", "t/f"),
    "link again": lambda: os.link("t/f", "t/g"), "rename to itself": lambda: os.rename("t/f", "t/g"), "mkdir": lambda: os.mkdir("t/d"),
    "mkdir in it": lambda: os.mkdir("t/d/d"), "rename across": lambda: os.rename("t/g", "t/d/g"), "create in it": lambda: file("t/d/f"),
    "rename over": lambda: os.rename("t/d/f", "t/d/g"), "symlink": lambda: os.symlink("f", "t/s"), "mkfifo": lambda: os.mkfifo("t/p"),
    "move a directory": lambda: os.rename("t/d/d", "t/e"), "rmdir": lambda: os.rmdir("t/e"), "failing mkdir": lambda: os.mkdir("t/d"),
    "failing rmdir": lambda: os.rmdir("t/d"), "access": lambda: os.access("t/f", 0), "lutime": lambda: os.utime("t/s", (7, 8), follow_symlinks=False),
}.items():
    times(what, ["t", "t/f", "t/g", "t/d", "t/d/g", "t/s"], call)
report("links", *(os.lstat(name).st_nlink for name in ("t", "t/f", "t/d")))
report("long ago", [os.utime("t/f", ns=(0, at)) or os.stat("t/f").st_mtime_ns for at in (0, 1, 999_999_999, 2**31 * 10**9, 2**33 * 10**9)])

# Set-id bits, and the owner of new files.
for bits in (0o6755, 0o4711, 0o2755, 0o2745, 0o6644):
    for what, call in {"chown": lambda: os.chown("t/set", 5, 6), "chown nothing": lambda: os.chown("t/set", -1, -1),
                       "write": lambda: os.write(os.open("t/set", os.O_WRONLY), b"x"), "truncate": lambda: os.truncate("t/set", 1),
                       "open truncating": lambda: os.open("t/set", os.O_WRONLY | os.O_TRUNC), "link": lambda: os.link("t/set", "t/set2"),
                       "fallocate": lambda: os.posix_fallocate(os.open("t/set", os.O_WRONLY), 0, 99),
                       "chgrp by owner": lambda: sub((1234, 1234, [4321]), lambda: os.chown("t/set", -1, 4321)),
                       "chmod by owner": lambda: sub(OWNER, lambda: os.chmod("t/set", bits)),
                       "write by another": lambda: sub(OTHER, lambda: os.write(os.open("t/set", os.O_WRONLY), b"x")),
                       "truncation by another": lambda: sub(OTHER, lambda: os.truncate("t/set", 1)),
                       "open truncating by another": lambda: sub(OTHER, lambda: os.open("t/set", os.O_WRONLY | os.O_TRUNC))}.items():
        file("t/set")
        os.chown("t/set", 1234, 4321 if "chmod" in what else 1234)
        os.chmod("t/set", bits | 0o002)
        call()
        report(f"{bits:o} after {what}:", mode("t/set"), owner("t/set"))
        removed("t/set2")
        removed("t/set")
for how, bits in {"plain": 0o777, "setgid": 0o2777}.items():
    folder(f"t/{how}", bits)
    os.chown(f"t/{how}", 0, 4321)
    os.chmod(f"t/{how}", bits)
    for who in (OWNER, MEMBER, (0, 0, [])):
        def make():
            at = f"t/{how}/{who[0]}-{len(who[2])}"
            file(at + "f", 0o2775)
            folder(at + "d", 0o777)
            os.mkdir(at + "e", 0o2700)
            os.symlink("x", at + "l")
            os.mkfifo(at + "p")
            report(f"made in {how}:", *((mode(at + kind), *owner(at + kind)) for kind in "fdelp"))
        sub(who, make)
for mask in (0o022, 0o077, 0o000, 0o777):
    def masked():
        os.umask(mask)
        os.close(os.open("t/plain/u", os.O_CREAT | os.O_WRONLY, 0o6777))
        os.mkdir("t/plain/v", 0o7777)
        os.mkfifo("t/plain/w", 0o666)
        os.mknod("t/plain/x", stat.S_IFREG | 0o666)
        report(f"masked {mask:o}:", *(mode(f"t/plain/{name}") for name in "uvwx"))
        os.rmdir("t/plain/v")
        for name in "uwx":
            os.unlink(f"t/plain/{name}")
    sub(OWNER, masked)

# Sticky directories: which users may remove and rename.
for who in (OWNER, OTHER, (0, 0, [])):
    for whose_dir in (0, 1234):
        for bits in (0o777, 0o1777):
            folder("sticky", bits)
            for name, whose in {"theirs": 1234, "roots": 0, "others": 999}.items():
                file(f"sticky/{name}")
                os.chown(f"sticky/{name}", whose, whose)
                os.mkdir(f"sticky/{name}d")
                os.chown(f"sticky/{name}d", whose, whose)
            os.chown("sticky", whose_dir, 0)

            def meddle():
                results = []
                for name in ("theirs", "roots", "others"):
                    at = f"sticky/{name}"
                    results += [outcome(os.rename, at, at + "2"), outcome(os.rename, at + "2", at), outcome(os.rename, at + "d", at + "e"),
                                outcome(os.link, at, at + "3"), outcome(os.unlink, at), outcome(os.rmdir, at + "d")]
                report(f"sticky {who[0]} {whose_dir} {bits:o}:", *(result or "yes" for result in results))
            sub(who, meddle)
            removed("sticky")

# Access control lists (acl(5)), as the kernel has them.
def entries(*them):
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", tag, may, who) for tag, may, who in them)


USER_OBJ, USER, GROUP_OBJ, MASK, REST, ALL = 1, 2, 4, 16, 32, 0xffffffff
for what, his, mask, rest in (("granted", 7, 7, 0), ("masked", 7, 2, 0), ("refused", 0, 7, 7)):
    file("t/acl")
    folder("t/acld", 0o777)
    file("t/acld/in")
    names = entries((USER_OBJ, 6, ALL), (USER, his, 1234), (GROUP_OBJ, 0, ALL), (MASK, mask, ALL), (REST, rest, ALL))
    for name in ("t/acl", "t/acld"):
        os.setxattr(name, "system.posix_acl_access", names)
    report(f"list, {what}:", mode("t/acl"), mode("t/acld"), os.getxattr("t/acl", "system.posix_acl_access") == names)
    sub(OWNER, lambda: report(f"list, {what}, open:", outcome(os.open, "t/acl", os.O_RDONLY), outcome(os.open, "t/acl", os.O_WRONLY),
                            outcome(os.listdir, "t/acld"), outcome(os.stat, "t/acld/in"), outcome(os.mkdir, "t/acld/d")))
    sub(OTHER, lambda: report(f"list, {what}, another:", outcome(os.open, "t/acl", os.O_RDONLY), outcome(os.stat, "t/acld/in")))
    removed("t/acl")
    removed("t/acld")
folder("t/acld")
os.setxattr("t/acld", "system.posix_acl_default", entries((USER_OBJ, 7, ALL), (USER, 5, 1234), (GROUP_OBJ, 5, ALL), (MASK, 5, ALL), (REST, 5, ALL)))
os.umask(0o077)
os.mkdir("t/acld/d", 0o777)
os.close(os.open("t/acld/f", os.O_CREAT | os.O_WRONLY, 0o666))
report("list, inherited whatever the umask:", mode("t/acld/d"), mode("t/acld/f"))
os.umask(0)

# Open files.
file("t/open")
handle = os.open("t/open", os.O_PATH)
attempt("path: read", os.read, handle, 1)
attempt("path: fstat", lambda: os.fstat(handle).st_size)
attempt("path: fchmod", os.fchmod, handle, 0o600)
attempt("path: openat", os.open, f"/proc/self/fd/{handle}", os.O_RDONLY)
attempt("without a name", os.open, "t", os.O_TMPFILE | os.O_RDWR, 0o600)
handle = os.open("t/open", os.O_RDWR | os.O_APPEND)
attempt("append", lambda: (os.write(handle, b"more"), os.lseek(handle, 0, os.SEEK_CUR))[1])
attempt("append: pwrite", lambda: (os.pwrite(handle, b"end", 0), os.pread(handle, 99, 0))[1])
attempt("seek before", os.lseek, handle, -1, os.SEEK_SET)
attempt("beyond", lambda: (os.lseek(handle, 9999, os.SEEK_SET), os.read(handle, 9))[1])
attempt("negative size", os.ftruncate, handle, -1)
attempt("too large", os.ftruncate, handle, 2**62)
attempt("too far", os.pwrite, handle, b"x", 2**62)
attempt("far", lambda: (os.ftruncate(handle, 2**41), os.fstat(handle).st_size, os.pread(handle, 3, 2**41 - 3), os.ftruncate(handle, 0))[1:3])
attempt("read of a directory", lambda: os.read(os.open("t", os.O_RDONLY), 9))
attempt("fsync of a pipe", lambda: os.fsync(os.open("t/p", os.O_RDWR)))
attempt("pipe", lambda: (lambda both: (os.write(both, b"through"), os.read(both, 9))[1])(os.open("t/p", os.O_RDWR)))
attempt("pipe nobody reads", os.open, "t/p", os.O_WRONLY | os.O_NONBLOCK)
attempt("socket", os.open, "s", os.O_RDWR)
attempt("connect", lambda: socket.socket(socket.AF_UNIX).connect("s"))
os.mkdir("t/left")
inside = os.open("t/left", os.O_RDONLY)
os.rmdir("t/left")
attempt("in a directory that is gone: list", os.listdir, inside)
attempt("create", os.open, "x", os.O_CREAT | os.O_WRONLY, dir_fd=inside)
attempt("mkdir", os.mkdir, "x", dir_fd=inside)
attempt("links", lambda: os.fstat(inside).st_nlink)
one, other = os.open("t/f", os.O_RDWR), os.open("t/f", os.O_RDWR)
os.unlink("t/f")
attempt("gone: write", lambda: (os.pwrite(one, b"seen", 0), os.pread(other, 9, 0), os.fstat(other).st_nlink))
attempt("gone: truncate, chmod", lambda: (os.ftruncate(one, 2), os.fchmod(one, 0o640), os.fstat(other).st_size, stat.filemode(os.fstat(other).st_mode))[2:])
attempt("gone: utime, attribute", lambda: (os.utime(one, (5, 6)), os.setxattr(one, "user.a", b"1"), os.getxattr(other, "user.a"), os.fstat(other).st_mtime)[2:])
attempt("gone: again by its descriptor", lambda: os.pread(os.open(f"/proc/self/fd/{one}", os.O_RDONLY), 9, 0))
attempt("gone: link", os.link, f"/proc/self/fd/{one}", "t/back", follow_symlinks=True)

# Directories that change while they are read: entries that exist all the time appear once.
os.mkdir("t/walk")
for number in range(300):
    file(f"t/walk/{number:03}")
with os.scandir("t/walk") as entries:
    seen = []
    for entry in entries:
        seen.append(entry.name)
        if int(entry.name) % 3 == 0:
            os.unlink(f"t/walk/{entry.name}")
report("removed on the way:", len(seen) == len(set(seen)) == 300, len(os.listdir("t/walk")))
