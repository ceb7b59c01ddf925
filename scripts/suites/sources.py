"""The sources of third-party test suites: Debian packages and crates, downloaded and built in a folder that can be kept
for later runs. Nothing is installed."""

import os
import pathlib
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "kernels"))
from debian import Debian  # noqa: E402

# One release, so that the tests are the same on every machine.
RELEASE = ("debian bookworm",)
JOBS = f"-j{os.cpu_count()}"
XFSTESTS = "https://git.kernel.org/pub/scm/fs/xfs/xfstests-dev.git"

# The build command for each source.
BUILDS = {
    "zlib": "",
    "xz-utils": "",
    "git": f"make {JOBS} NO_CURL=1 NO_EXPAT=1 NO_OPENSSL=1 NO_GETTEXT=1 NO_TCLTK=1 CFLAGS=-O1",
    "sqlite3": "./configure -q CFLAGS=-O1 --disable-readline && make testfixture",
    "postgresql-15": "./configure -q CFLAGS=-O1 --without-readline --without-icu --without-zlib"
    f" && make {JOBS} && make {JOBS} -C src/test/regress && make {JOBS} -C contrib/amcheck"
    " && for part in . contrib/amcheck; do make -C $part DESTDIR=$PWD/installed install; done",
}
CRATES = {"pjdfstest": "0.2.2", "fsx": "0.3.2"}

# A fixed configuration: the package's own configure checks for much that fsstress does not need.
HEADS = "SYS_TYPES SYS_STAT SYS_STATVFS SYS_TIME SYS_IOCTL SYS_PARAM SYS_WAIT MALLOC ERRNO STRING STRINGS ERR STDINT UNISTD"
HEADS += " STDLIB FCNTL DIRENT LINUX_FALLOC XFS_XFS"
FSSTRESS = "".join(f"#define HAVE_{head}_H 1\n" for head in HEADS.split())
FSSTRESS += "".join(f"#define {has} 1\n" for has in ("STDC_HEADERS", "HAVE_FALLOCATE", "FALLOCATE", "HAVE_RENAMEAT2"))


class Missing(Exception):
    """A source is not available on this machine."""


class Sources:
    """A folder with downloaded and built sources."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.debian = Debian(self.folder / "debian", RELEASE, "deb-src")

    def run(self, name, script, where):
        """Runs a build script; its output is stored beside the source."""
        log = self.folder / f"{name}.log"
        with log.open("w", encoding="utf-8") as said:
            done = subprocess.run(["bash", "-ec", script], cwd=where, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise Missing(f"{name} cannot be made: {log} says why")

    def get(self, name):
        """Makes a source available under its name, built with all that its tests need."""
        place = self.folder / name
        built = place / ".built"
        if built.exists():
            return
        print(f"test-suites: fetching and building {name}", file=sys.stderr, flush=True)
        # Built at its final path, because the results may contain that path.
        shutil.rmtree(place, ignore_errors=True)
        if name in CRATES:
            install = f"cargo install --quiet --locked --root {place} --version {CRATES[name]} {name}"
            self.run(name, f"CARGO_TARGET_DIR={place}/target {install}; rm -r {place}/target", self.folder)
        elif name == "xfstests":
            self.fsstress(place)
        else:
            self.unpack(name, place)
            self.run(name, BUILDS[name], place)
        built.touch()

    def unpack(self, package, place):
        """Downloads the source of a Debian package and applies its patches."""
        if not self.debian.source(package, place):
            raise Missing(f"Debian's source of {package} cannot be fetched; is there a network?")

    def fsstress(self, place):
        """fsstress is in xfstests, which has no package: it is copied from TERN_XFSTESTS, or cloned."""
        tree = os.environ.get("TERN_XFSTESTS")
        if not tree:
            tree = self.folder / "xfstests.git"
            if not tree.exists():
                self.run("xfstests", f"timeout 120 git clone -q --depth 1 {XFSTESTS} {tree}", self.folder)
        place.mkdir()
        (place / "config.h").write_text(FSSTRESS, encoding="ascii")
        words = f"-O1 -w -D_GNU_SOURCE -D_FILE_OFFSET_BITS=64 -I{place} -I{tree}/include -I{tree}/src"
        self.run("xfstests", f"gcc {words} {tree}/ltp/fsstress.c {tree}/lib/random.c -lm -o {place}/fsstress", place)
