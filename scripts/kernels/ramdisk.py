"""The initial file system of a machine: one archive with programs, the libraries they need, and the kernel's modules."""

import lzma
import os
import pathlib
import re
import stat
import subprocess
import tempfile

# Modules, if not built in: the network card, a disk, their buses, and the file systems used.
MODULES = ("virtio_pci", "virtio_net", "virtio_blk", "fuse")
FOLDERS = ("bin", "etc/tern", "lib/modules", "mnt", "proc", "root", "run", "sys", "tmp", "usr/bin", "var/cache", "dev")


class Ramdisk:
    """A cpio archive under construction, in the format that the kernel unpacks ("newc")."""

    def __init__(self):
        self.files = {}
        for folder in FOLDERS:
            self.folder(folder)

    def folder(self, name):
        parts = pathlib.PurePosixPath(name).parts
        for length in range(1, len(parts) + 1):
            self.files.setdefault("/".join(parts[:length]), (stat.S_IFDIR | 0o755, b""))

    def file(self, name, content, mode=0o644):
        self.folder(os.path.dirname(name) or "bin")
        self.files[name] = (stat.S_IFREG | mode, content)

    def link(self, name, target):
        self.folder(os.path.dirname(name))
        self.files[name] = (stat.S_IFLNK | 0o777, target.encode())

    def program(self, source, name):
        """Adds a program of this machine and its shared libraries, at their original paths."""
        self.file(name, stripped(source), 0o755)
        listed = subprocess.run(["ldd", source], capture_output=True, text=True).stdout
        for library in re.findall(r"(/\S+) \(0x", listed):
            if library[1:] not in self.files:
                self.file(library[1:], pathlib.Path(library).read_bytes(), 0o755)

    def modules(self, kernel):
        """Adds the modules; `lib/modules/order` lists them in loading order."""
        order = []

        def load(name):
            source = kernel.module(name)
            if source is None or name in order:
                return
            content = source.read_bytes()
            if source.suffix == ".xz":
                content = lzma.decompress(content)
            needs = re.search(rb"\0depends=([^\0]*)\0", content)
            for needed in (needs[1].decode() if needs else "").split(","):
                load(needed)
            self.file(f"lib/modules/{name}.ko", content)
            order.append(name)

        for name in MODULES:
            load(name)
        self.file("lib/modules/order", "".join(f"{name}\n" for name in order).encode())

    def write(self, path):
        with open(path, "wb") as archive:
            for inode, (name, (mode, content)) in enumerate([*self.files.items(), ("TRAILER!!!", (0, b""))], 1):
                spelled = name.encode() + b"\0"
                fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(spelled), 0)
                head = b"070701" + b"".join(b"%08x" % field for field in fields) + spelled
                archive.write(head + bytes(-len(head) % 4) + content + bytes(-len(content) % 4))


def node(kernel, binaries):
    """The archive for a machine that can be a node."""
    disk = Ramdisk()
    disk.file("init", (pathlib.Path(__file__).resolve().parent / "init").read_bytes(), 0o755)
    disk.program("/bin/busybox", "bin/busybox")
    disk.link("bin/sh", "busybox")
    for name in ("tern", "ternd", "tern-shim", "tern-mfs"):
        disk.program(binaries / name, f"usr/bin/{name}")
    for name in ("migrate", "mps", "mosrun", "mosctl", "mount.mfs"):
        disk.link(f"usr/bin/{name}", "tern")
    disk.file("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n")
    disk.file("etc/group", b"root:x:0:\nnogroup:x:65534:\n")
    disk.modules(kernel)
    return disk


def stripped(source):
    """A program without debug information, since the archive is copied into memory twice."""
    with tempfile.NamedTemporaryFile() as copy:
        if subprocess.run(["strip", "-o", copy.name, source], capture_output=True).returncode == 0:
            return pathlib.Path(copy.name).read_bytes()
    return pathlib.Path(source).read_bytes()
