"""Runs a benchmark's cluster inside this machine, and reads from outside what its nodes use."""

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
# CPUs of each of two equal nodes: the most that a lab may have on a small machine, and less than
# one processor.
EQUAL = min(1.0, 0.375 * (os.cpu_count() or 1))
PATIENCE = 60  # timeout in seconds for operations that should complete at once


def need_root(name):
    """Exits if the program does not run as root. Afterwards terminating signals raise SystemExit, so that nodes are taken down
    and folders are removed."""
    if os.geteuid():
        sys.exit(f"{name}: a cluster inside one machine takes root: try sudo make {name}")
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _frame: sys.exit(128 + number))


class Bed:
    """Nodes with these shares of a CPU each. They are taken down at the end of `with`."""

    def __init__(self, binaries, name, speeds, link=None):
        self.binaries = pathlib.Path(binaries).resolve()
        self.tern, self.speeds, self.link = self.binaries / "tern", speeds, link
        # A unique name, so that two benchmarks can run at the same time.
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
        """Gives the lab priority over all other processes of this machine, or ends that priority."""
        version_1, version_2 = ("cpu.shares", 262_144, 1024), ("cpu.weight", 10_000, 100)
        for mount, (file, most, usual) in ("cpu", version_1), ("cpu,cpuacct", version_1), ("", version_2):
            for group in (CGROUPS / mount / "tern-lab", CGROUPS / mount / "tern-lab" / self.name):
                if (weight := group / file).exists():
                    weight.write_text(str(most if first else usual), encoding="ascii")

    def processor(self, node):
        """The processor of this machine to which a node is bound."""
        return (node - 1) % os.cpu_count()

    def bind(self):
        """Binds each node, and thus all that its daemon starts, to one processor, as on a machine of that speed. Two threads on
        two processors would use up the node's share of a few milliseconds in half of the time. All other threads, including
        those that serve remote calls, would then wait for the other half."""
        for node in self.nodes:
            for pid in self.processes(node):
                # A process that ended meanwhile has no unbound children.
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    for task in os.listdir(f"/proc/{pid}/task"):
                        with contextlib.suppress(ProcessLookupError):
                            os.sched_setaffinity(int(task), {self.processor(node)})

    def command(self, node, script):
        """The command that runs a bash script in a node, in root's home directory there."""
        inside = f"PATH={self.binaries}:$PATH; cd; {script}"
        bound = ["taskset", "-c", str(self.processor(node))]
        return [self.tern, "lab", "exec", "--lab", self.name, str(node), "--", *bound, "bash", "-c", inside]

    def restart(self, node):
        """Reboots a node."""
        subprocess.run([self.tern, "lab", "restart", "--lab", self.name, str(node)], check=True, stdout=subprocess.DEVNULL)

    def start(self, node, script, **options):
        return subprocess.Popen(self.command(node, script), stdin=subprocess.DEVNULL, **options)

    def run(self, node, script):
        """Runs a script to its end, and returns its output."""
        done = subprocess.run(self.command(node, script), stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"on node {node}, {script!r} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def wait_until_known(self):
        """Waits until each node has received the load of every other node."""
        ask = "".join(f"mosctl getload {node} >/dev/null 2>&1 && " for node in self.nodes) + "true"
        end = time.monotonic() + PATIENCE
        for node in self.nodes:
            while subprocess.run(self.command(node, ask), stdin=subprocess.DEVNULL, check=False).returncode:
                if time.monotonic() > end:
                    raise SystemExit(f"node {node} has not received the load of the others")
                time.sleep(0.5)

    def group(self, node):
        """A node's control group that counts CPU time, in version 1 or 2."""
        for mount in (CGROUPS / "cpuacct", CGROUPS / "cpu,cpuacct", CGROUPS):
            if (group := mount / "tern-lab" / self.name / f"node{node}").exists():
                return group
        raise SystemExit(f"no control group counts what node {node} uses")

    def used(self, node):
        """CPU seconds used by all processes of a node."""
        group = self.group(node)
        if (old := group / "cpuacct.usage").exists():
            return int(old.read_text()) / 1e9
        return int(re.search(r"usage_usec (\d+)", (group / "cpu.stat").read_text())[1]) / 1e6

    def processes(self, node):
        """The processes of a node: outer pid: name, state, CPU seconds. Costs the node no CPU time."""
        all_processes = {}
        for file in self.group(node).rglob("cgroup.procs"):
            try:
                pids = file.read_text().split()
            except OSError:  # the group was removed meanwhile
                continue
            for pid in pids:
                try:
                    before, _, after = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")
                except OSError:  # the process ended meanwhile
                    continue
                fields = after.split()
                used = (int(fields[11]) + int(fields[12])) / TICKS
                all_processes[int(pid)] = (before.partition("(")[2], fields[0], used)
        return all_processes

    def log(self, node):
        """The log of a node's ternd."""
        return pathlib.Path(f"/run/tern-lab/{self.name}/node{node}/ternd.log").read_text()

    def share_files(self):
        """Mounts the cluster's file system on node 1."""
        self.run(1, "mkdir -p /mfs; mount.mfs mymfs /mfs; ls /mfs/2/root")

    def seconds(self, node, script):
        """The duration of a script on a node, by the node's own clock."""
        timed = f"a=$EPOCHREALTIME; {script}; e=$?; b=$EPOCHREALTIME; echo; echo $a $b; exit $e"
        begun, ended = map(float, self.run(node, timed).split()[-2:])
        return ended - begun


class Watch(threading.Thread):
    """Calls a function periodically, with the seconds since creation, until the end of `with`."""

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
    """CPU seconds that this machine was busy, and that its host took from it (steal)."""
    fields = [int(field) / TICKS for field in pathlib.Path("/proc/stat").read_text().split()[1:9]]
    user, nice, system, _idle, _wait, irq, softirq, steal = fields
    return user + nice + system + irq + softirq, steal


def machine():
    """A description of this machine in one line."""
    model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    name = model[1] if model else "unknown"
    return f"Linux {os.uname().release}, {os.cpu_count()} CPUs ({name}), load {os.getloadavg()[0]:.1f} before."


def wait_for(what, check):
    end = time.monotonic() + PATIENCE
    while not check():
        if time.monotonic() > end:
            raise SystemExit(what)
        time.sleep(0.1)


def enable_connections(bed):
    """Has connections move in this cluster."""
    for node in bed.nodes:
        bed.run(node, "echo 'connections = true' >> /etc/tern/ternd.toml")
    for node in bed.nodes:
        bed.restart(node)
    bed.go_first(True)
    bed.bind()
    bed.wait_until_known()
    for node in bed.nodes:
        wait_for("tern-net does not run", lambda n=node: bed.run(n, "ls /run/tern").find("net.sock") >= 0)
    bed.bind()
