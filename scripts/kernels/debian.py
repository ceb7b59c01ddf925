"""Debian's packaged kernels, and sources of other packages: downloaded by apt with separate package lists, and unpacked.
Nothing is installed."""

import os
import pathlib
import re
import subprocess

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
MIRROR = "http://deb.debian.org"
# Releases, from the oldest that Debian still serves to the newest.
SUITES = (
    "debian bullseye", "debian-security bullseye-security", "debian bookworm", "debian-security bookworm-security",
    "debian trixie", "debian-security trixie-security", "debian trixie-backports", "debian sid",
)
# The packages that contain the kernel and its modules. Since version 7 there are several.
PARTS = ("linux-image-", "linux-binary-", "linux-modules-")
PATIENCE = 300  # timeout in seconds for a download


class Debian:
    """A folder of Debian packages, which can be kept for later runs."""

    def __init__(self, folder, suites=SUITES, kind="deb"):
        self.folder = pathlib.Path(folder).resolve()
        for name in ("lists/partial", "archives/partial", "deb"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        sources = self.folder / "sources.list"
        lines = [f"{kind} [signed-by={KEYRING} arch=amd64] {MIRROR}/{suite} main\n" for suite in suites]
        sources.write_text("".join(lines), encoding="ascii")
        config = self.folder / "apt.conf"
        config.write_text(
            f'Dir::Etc::sourcelist "{sources}";\nDir::Etc::sourceparts "/dev/null";\n'
            f'Dir::State::lists "{self.folder}/lists";\nDir::Cache "{self.folder}";\n'
            'APT::Sandbox::User "root";\nAcquire::Languages "none";\n', encoding="utf-8")
        self.environment = {**os.environ, "APT_CONFIG": str(config)}
        self.updated = False

    def apt(self, *words, where=None):
        """Runs one of apt's tools and returns its output; None if it fails."""
        done = subprocess.run(words, cwd=where, env=self.environment, timeout=PATIENCE, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else None

    def kernel(self, version):
        """The folder of the newest available kernel of this version (`6.12`). Downloads it if necessary."""
        place = self.folder / version
        if not (place / "release").exists():
            self.fetch(version, place)
        return Kernel(place)

    def update(self):
        """Downloads Debian's package lists, once."""
        if not self.updated:
            if self.apt("apt-get", "update") is None:
                raise SystemExit("Debian's lists cannot be fetched; is there a network?")
            self.updated = True

    def source(self, package, place):
        """Downloads a package's source, unpacks it and applies its patches. Returns whether the package exists."""
        self.update()
        archives = self.folder / "deb" / package
        archives.mkdir(exist_ok=True)
        if self.apt("apt-get", "source", "--download-only", package, where=archives) is None:
            return False
        (description,) = archives.glob("*.dsc")
        return self.apt("dpkg-source", "--no-copy", "--extract", description, place) is not None

    def fetch(self, version, place):
        self.update()
        pattern = rf"^linux-image-{re.escape(version)}[.].*-cloud-amd64$"
        names = (self.apt("apt-cache", "search", "--names-only", pattern) or "").splitlines()
        names = sorted((line.split()[0] for line in names), key=by_version, reverse=True)
        for name in names:
            # The lists may name versions that the mirror has replaced already.
            if self.take(name, place):
                (place / "release").write_text(name.removeprefix("linux-image-"), encoding="ascii")
                return
        raise SystemExit(f"test-kernels: Debian has no kernel {version}; it has others, see packages.debian.org")

    def take(self, name, place):
        """Downloads and unpacks a kernel's packages. Returns whether all of them exist."""
        depends = self.apt("apt-cache", "depends", "--no-recommends", "--no-suggests", name) or ""
        others = [word for word in re.findall(r"Depends: (\S+)", depends) if word.startswith(PARTS)]
        files = []
        for package in dict.fromkeys([name, *others]):
            deb = self.folder / "deb" / package
            deb.mkdir(exist_ok=True)
            if not list(deb.glob("*.deb")) and self.apt("apt-get", "download", package, where=deb) is None:
                return False
            files += deb.glob("*.deb")
        # Only if all are available: the modules of one build do not fit the kernel of another.
        for file in files:
            subprocess.run(["dpkg", "-x", file, place], check=True)
        return bool(list(place.glob("**/vmlinuz*")))


def by_version(name):
    return [int(number) for number in re.findall(r"\d+", name)]


class Kernel:
    """An unpacked kernel."""

    def __init__(self, place):
        self.place = place
        self.release = (place / "release").read_text(encoding="ascii")
        self.image = next(place.glob("**/vmlinuz*"))

    def module(self, name):
        """The path of a module; None if it is built in or missing."""
        for spelled in {name, name.replace("_", "-")}:
            for file in self.place.glob(f"**/kernel/**/{spelled}.ko*"):
                return file
        return None
