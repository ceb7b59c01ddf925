"""Performs one operation for each input line, in the directory that is its first argument, and replies with a line.

If several of these run, one on the disk and others through /mfs, the same operations must have the same replies.
"""
import ctypes
import errno
import mmap
import os
import random
import stat
import sys
import zlib

PAGE = mmap.PAGESIZE
FLAGS = {"r": os.O_RDONLY, "w": os.O_WRONLY, "+": os.O_RDWR, "a": os.O_APPEND, "c": os.O_CREAT, "t": os.O_TRUNC, "x": os.O_EXCL}
# A time that only utime can have set.
OLD = 1_000_000_000
C = ctypes.CDLL(None, use_errno=True)
# Open files by their names.
held = {}


def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def data(length, seed):
    return random.Random(int(seed)).randbytes(int(length))


def seen(content):
    return f"{len(content)}:{zlib.crc32(content):08x}"


def like(is_):
    """Those attributes of a file that can be compared."""
    size = is_.st_size if not stat.S_ISDIR(is_.st_mode) else "-"
    time = is_.st_mtime_ns if is_.st_mtime < OLD else "now"
    return f"{stat.filemode(is_.st_mode)} {is_.st_nlink} {is_.st_uid} {is_.st_gid} {size} {time}"


def open_(name, path, letters):
    flags = 0
    for letter in letters:
        flags |= FLAGS[letter]
    held[name] = os.open(path, flags, 0o644)


def close(name):
    os.close(held.pop(name))


def mapped(name, at, length, seed=None):
    """Reads a part of a file through a map, or stores into it."""
    file, at = held[name], int(at) // PAGE * PAGE
    length = min(int(length), os.fstat(file).st_size - at)
    if length <= 0:
        return "beyond"
    shared = seed is not None
    with mmap.mmap(file, length, flags=mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE, offset=at) as map_:
        if shared:
            map_[:] = data(length, seed)
            map_.flush()
            return length
        content = map_[:]
        map_[0:1] = b"!"
        return seen(content)


def allocate(name, mode, at, length):
    # 1 keeps the size, 2 makes a hole, 16 makes zeros: fallocate(2).
    at, length = ctypes.c_int64(int(at)), ctypes.c_int64(int(length))
    checked(C.fallocate(held[name], int(mode), at, length))


def copy(one, at, other, to, length):
    # As cp does: the kernel asks no file system for the end of a copied file, and uses the size it has cached.
    os.fstat(held[one])
    return os.copy_file_range(held[one], held[other], int(length), int(at), int(to))


def rename(old, new, flags):
    # 1 does not replace, 2 exchanges: renameat2(2).
    checked(C.renameat2(-100, old.encode(), -100, new.encode(), int(flags)))


def put(path, length, seed):
    with open(path, "wb") as file:
        return file.write(data(length, seed))


def get(path):
    with open(path, "rb") as file:
        return seen(file.read())


def scan(path):
    with os.scandir(path) as entries:
        return sorted((entry.name, entry.is_dir(follow_symlinks=False), entry.is_symlink()) for entry in entries)


def tree():
    """The whole tree, as a hash and a count."""
    lines = []
    for folder, folders, files in os.walk("."):
        for name in folders + files:
            path = os.path.join(folder, name)
            is_ = os.lstat(path)
            line = f"{path} {like(is_)}"
            if stat.S_ISREG(is_.st_mode):
                line += f" {get(path)}"
            elif stat.S_ISLNK(is_.st_mode):
                line += f" {os.readlink(path)}"
            if not stat.S_ISLNK(is_.st_mode):
                line += f" {[(name, os.getxattr(path, name)) for name in sorted(os.listxattr(path))]}"
            lines.append(line)
    return "; ".join(sorted(lines))


OPERATIONS = {
    "open": open_,
    "close": close,
    "pread": lambda name, at, length: seen(os.pread(held[name], int(length), int(at))),
    "pwrite": lambda name, at, length, seed: os.pwrite(held[name], data(length, seed), int(at)),
    "read": lambda name, length: seen(os.read(held[name], int(length))),
    "write": lambda name, length, seed: os.write(held[name], data(length, seed)),
    "seek": lambda name, at: os.lseek(held[name], int(at), os.SEEK_SET),
    "end": lambda name: os.lseek(held[name], 0, os.SEEK_END),
    "ftruncate": lambda name, size: os.ftruncate(held[name], int(size)),
    "map": mapped,
    "store": mapped,
    "allocate": allocate,
    "copy": copy,
    "fstat": lambda name: like(os.fstat(held[name])),
    "sync": lambda name: os.fsync(held[name]),
    "truncate": lambda path, size: os.truncate(path, int(size)),
    "create": lambda path: os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640)),
    "fifo": lambda path: os.mkfifo(path, 0o600),
    "mkdir": lambda path: os.mkdir(path, 0o750),
    "rename": rename,
    "link": os.link,
    "symlink": os.symlink,
    "readlink": os.readlink,
    "unlink": os.unlink,
    "rmdir": os.rmdir,
    "chmod": lambda path, mode: os.chmod(path, int(mode, 8)),
    "chown": lambda path, uid, gid: os.lchown(path, int(uid), int(gid)),
    "utime": lambda path, when: os.utime(path, (int(when), int(when))),
    "set": lambda path, name, value, flags: os.setxattr(path, name, value.encode(), int(flags)),
    "value": os.getxattr,
    "unset": os.removexattr,
    "attributes": lambda path: sorted(os.listxattr(path)),
    "list": lambda path: sorted(os.listdir(path)),
    "scan": scan,
    "stat": lambda path: like(os.lstat(path)),
    "put": put,
    "get": get,
    "tree": tree,
}

os.chdir(sys.argv[1])
os.umask(0o022)
print("ready", flush=True)
for line in sys.stdin:
    operation, *arguments = line.split()
    try:
        outcome = OPERATIONS[operation](*arguments)
    except OSError as error:
        outcome = errno.errorcode[error.errno]
    except KeyError:
        # The file could not be opened; the failed open was compared already.
        outcome = "not open"
    print(outcome, flush=True)
