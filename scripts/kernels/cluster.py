"""Machines that are nodes of one cluster."""

import time

from machine import Machine, Wire

NODE = "10.77.0.{}"


class Cluster:
    """Machines that are nodes of one cluster. They are stopped at the end of `with`."""

    def __init__(self, kernels, disks, folder, cpus=1, settings="", stores=()):
        self.parts, self.settings = [], settings
        try:
            self.parts.append(Wire(folder, len(kernels)))
            self.machines = []
            for number, (kernel, disk) in enumerate(zip(kernels, disks), 1):
                store = stores[number - 1] if stores else None
                self.machines.append(Machine(number, kernel, disk, folder, cpus=cpus, store=store))
                self.parts.append(self.machines[-1])
            for machine in self.machines:
                machine.connect()
            for machine in self.machines:
                machine.wait_until_ready()
            self.set_clocks()
            self.join()
        except BaseException:
            self.close()
            raise

    def set_clocks(self):
        """Sets all machines to the same time: the hardware clock that they start from has a resolution of seconds."""
        for machine in self.machines:
            machine.must("date >/dev/null")
        second = int(time.time()) + 1
        time.sleep(second - time.time())
        for machine in self.machines:
            machine.begin(f"date -s @{second} >/dev/null")
        for machine in self.machines:
            machine.end()

    def join(self):
        first, *others = self.machines
        first.must(f"tern init --address {NODE.format(1)}")
        self.start(first)
        for machine in others:
            token = first.must("until tern token; do sleep 0.5; done 2>/dev/null").strip()
            join = f"tern join {NODE.format(1)} {token} --address {NODE.format(machine.number)}"
            machine.must(f"for i in $(seq 20); do {join} && break; sleep 1; done")
            self.start(machine)
        for other in self.machines[1:]:
            first.must(f"for i in $(seq 60); do tern status | grep -q {NODE.format(other.number)} && break; sleep 0.5; done")

    def start(self, machine):
        machine.must(f"printf '{self.settings}' >>/etc/tern/ternd.toml; setsid ternd >/root/ternd.log 2>&1 &")

    def scene(self):
        """The last log lines of the nodes."""
        look = "tail -n 15 /root/ternd.log /run/tern/shims/*.log; dmesg | tail -n 5"
        return "\n".join(f"--- node {m.number} ({m.kernel.release})\n{m.run(look)[1]}" for m in self.machines)

    def close(self):
        for part in reversed(self.parts):
            part.close()
