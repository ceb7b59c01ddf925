"""A cluster inside this machine for a benchmark to lie in, and what its nodes use, read from outside of them."""

import contextlib
import importlib.machinery
import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

TICKS = os.sysconf("SC_CLK_TCK")
CGROUPS = pathlib.Path("/sys/fs/cgroup")
# Of a CPU for each of two nodes: as much as a lab may have of a small machine, and no more than one processor.
EQUAL = min(1.0, 0.375 * (os.cpu_count() or 1))
PATIENCE = 60  # seconds that whatever is to happen at once may take


def need_root(name):
    """Ends the program if it is not root's. From then on it ends by an error if it is told to end, so that nodes go down and
    folders are removed."""
    if os.geteuid():
        sys.exit(f"{name}: a cluster inside one machine takes root: try sudo make {name}")
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _frame: sys.exit(128 + number))


class Bed:
    """Nodes with these shares of a CPU each; they go down at the end of `with`."""

    def __init__(self, binaries, name, speeds, link=None):
        self.binaries = pathlib.Path(binaries).resolve()
        self.tern, self.speeds, self.link = self.binaries / "tern", speeds, link
        # Nobody else's, so that two benchmarks can be there at the same time.
        self.name = f"{name}{os.getpid()}"
        self.nodes = range(1, len(speeds) + 1)

    def __enter__(self):
        shares = ",".join(f"{speed:.4f}" for speed in self.speeds)
        up = [self.tern, "lab", "up", "--lab", self.name, "--speed", shares]
        if self.link:
            up += ["--link", self.link]
        subprocess.run(up, check=True, stdout=subprocess.DEVNULL)
        try:
            self.go_first(True)
            self.bind()
            self.wait_until_known()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.go_first(False)
        subprocess.run([self.tern, "lab", "down", "--lab", self.name], check=True, stdout=subprocess.DEVNULL)

    def go_first(self, first):
        """Whatever else runs on this machine waits while the nodes have something to do, or does so no more."""
        version_1, version_2 = ("cpu.shares", 262_144, 1024), ("cpu.weight", 10_000, 100)
        for mount, (file, most, usual) in ("cpu", version_1), ("cpu,cpuacct", version_1), ("", version_2):
            for group in (CGROUPS / mount / "tern-lab", CGROUPS / mount / "tern-lab" / self.name):
                if (weight := group / file).exists():
                    weight.write_text(str(most if first else usual), encoding="ascii")

    def processor(self, node):
        """The processor of this machine that a node has a share of."""
        return (node - 1) % os.cpu_count()

    def bind(self):
        """Gives each node one processor, as a machine of that speed would have, and so all that its daemon starts. Two
        threads on two processors would use up the node's share of a few milliseconds in half of the time, and all
        others would wait for the other half, those too that answer calls from elsewhere."""
        for node in self.nodes:
            for pid in self.processes(node):
                # What has ended meanwhile has started nothing that is not bound.
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    for task in os.listdir(f"/proc/{pid}/task"):
                        with contextlib.suppress(ProcessLookupError):
                            os.sched_setaffinity(int(task), {self.processor(node)})

    def command(self, node, script):
        """The command that runs a bash script in a node, in root's folder there."""
        inside = f"PATH={self.binaries}:$PATH; cd; {script}"
        bound = ["taskset", "-c", str(self.processor(node))]
        return [self.tern, "lab", "exec", "--lab", self.name, str(node), "--", *bound, "bash", "-c", inside]

    def start(self, node, script, **options):
        return subprocess.Popen(self.command(node, script), stdin=subprocess.DEVNULL, **options)

    def run(self, node, script):
        """Runs a script to its end, and returns what it says."""
        done = subprocess.run(self.command(node, script), stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"on node {node}, {script!r} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def wait_until_known(self):
        """Each node has heard of the load of each other."""
        ask = "".join(f"mosctl getload {node} >/dev/null 2>&1 && " for node in self.nodes) + "true"
        end = time.monotonic() + PATIENCE
        for node in self.nodes:
            while subprocess.run(self.command(node, ask), stdin=subprocess.DEVNULL, check=False).returncode:
                if time.monotonic() > end:
                    raise SystemExit(f"node {node} does not hear of the others")
                time.sleep(0.5)

    def group(self, node):
        """A node's control group where CPU time is counted, in version 1 or 2."""
        for mount in (CGROUPS / "cpuacct", CGROUPS / "cpu,cpuacct", CGROUPS):
            if (group := mount / "tern-lab" / self.name / f"node{node}").exists():
                return group
        raise SystemExit(f"no control group counts what node {node} uses")

    def used(self, node):
        """CPU seconds that all of a node has used."""
        group = self.group(node)
        if (old := group / "cpuacct.usage").exists():
            return int(old.read_text()) / 1e9
        return int(re.search(r"usage_usec (\d+)", (group / "cpu.stat").read_text())[1]) / 1e6

    def processes(self, node):
        """What runs in a node: pid outside of it: name, state, CPU seconds. Costs the node nothing."""
        all_processes = {}
        for file in self.group(node).rglob("cgroup.procs"):
            try:
                pids = file.read_text().split()
            except OSError:  # the group has just gone
                continue
            for pid in pids:
                try:
                    before, _, after = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")
                except OSError:  # it has just ended
                    continue
                fields = after.split()
                used = (int(fields[11]) + int(fields[12])) / TICKS
                all_processes[int(pid)] = (before.partition("(")[2], fields[0], used)
        return all_processes

    def log(self, node):
        """What a node's ternd has logged."""
        return pathlib.Path(f"/run/tern-lab/{self.name}/node{node}/ternd.log").read_text()

    def share_files(self):
        """Mounts the cluster's files on node 1."""
        self.run(1, "mkdir -p /mfs; mount.mfs mymfs /mfs; ls /mfs/2/root")

    def seconds(self, node, script):
        """How long a script takes on a node, by its own clock."""
        timed = f"a=$EPOCHREALTIME; {script}; e=$?; b=$EPOCHREALTIME; echo; echo $a $b; exit $e"
        begun, ended = map(float, self.run(node, timed).split()[-2:])
        return ended - begun


class Watch(threading.Thread):
    """Calls something now and then, with the seconds since it was made, until the end of `with`."""

    def __init__(self, every, look):
        super().__init__()
        self.every, self.look, self.over, self.begun = every, look, threading.Event(), time.monotonic()

    def run(self):
        while not self.over.wait(self.every):
            self.look(time.monotonic() - self.begun)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.join()


def neighbour(name):
    """Another script of this folder, as a module."""
    path = str(pathlib.Path(__file__).with_name(name))
    spec = importlib.util.spec_from_loader("neighbour", importlib.machinery.SourceFileLoader("neighbour", path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def machine_used():
    """CPU seconds that this whole machine has been busy, and that its host has kept from it."""
    fields = [int(field) / TICKS for field in pathlib.Path("/proc/stat").read_text().split()[1:9]]
    user, nice, system, _idle, _wait, irq, softirq, steal = fields
    return user + nice + system + irq + softirq, steal


def machine():
    """What it is, in one line."""
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    name = model[1] if model else "unknown"
    return f"Linux {os.uname().release}, {os.cpu_count()} CPUs ({name}), load {os.getloadavg()[0]:.1f} before."
