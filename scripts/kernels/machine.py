"""Virtual machines and the network between them. Their sockets are files in one folder, out of reach of other users."""

import os
import pathlib
import select
import socket
import subprocess
import threading
import time

# Always software emulation, so that the emulated processor is the same on every host.
MODEL = "max"
MEMORY_MIB = 1024
BOOT = 240  # timeout in seconds, for a busy host


class Machine:
    """One machine with a kernel, a network card, a console in a file, and a shell behind its second serial line."""

    def __init__(self, number, kernel, ramdisk, folder, model=MODEL, cpus=1, store=None):
        self.number, self.kernel = number, kernel
        folder = pathlib.Path(folder)
        self.console, self.line = folder / f"console{number}.log", folder / f"shell{number}"
        self.card = folder / f"card{number}"
        self.pending = b""
        self.counter, self.asked = 0, "start"
        self.words = [
            "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", model, "-smp", str(cpus), "-m", str(MEMORY_MIB),
            "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-kernel", kernel.image,
            "-initrd", ramdisk,
            # Without a stable TSC the vDSO would fall back to system calls, and the test would
            # prove nothing. The kernel's timer check is skipped, because it fails when the emulator
            # itself waits for a processor.
            "-append", f"console=ttyS0 quiet panic=-1 tsc=reliable no_timer_check mitigations=off net.ifnames=0 tern.node={number}",
            "-chardev", f"file,id=console,path={self.console}", "-serial", "chardev:console",
            "-chardev", f"socket,id=shell,path={self.line},server=on,wait=off", "-serial", "chardev:shell",
            "-netdev", f"dgram,id=net,local.type=unix,local.path={self.card},"
                       f"remote.type=unix,remote.path={folder}/wire{number}",
            "-device", f"virtio-net-pci,netdev=net,mac=52:54:00:00:00:{number:02x},romfile=",
        ]
        if store:
            # Writes that the machine has flushed are kept; those in its caches are not.
            self.words += ["-drive", f"if=virtio,format=raw,cache=writeback,file={store}"]
        self.shell = None
        self.start()

    def start(self):
        self.process = subprocess.Popen(self.words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def reset(self):
        """Simulates a power failure: all memory is lost. The machine reboots; the call does not wait for that."""
        self.close()
        self.shell, self.pending = None, b""
        self.line.unlink()
        self.card.unlink(missing_ok=True)
        self.start()

    def connect(self):
        """Connects to the machine's shell. Earlier output is lost."""
        end = time.monotonic() + BOOT
        while self.shell is None:
            shell = socket.socket(socket.AF_UNIX)
            try:
                shell.connect(str(self.line))
                self.shell = shell
            except (FileNotFoundError, ConnectionRefusedError):
                shell.close()
                self.alive(end)
                time.sleep(0.1)

    def wait_until_ready(self):
        """Waits until the machine's shell responds."""
        end = time.monotonic() + BOOT
        while b"@@ready" not in self.pending:
            self.receive(end)
        self.pending = b""

    def alive(self, end):
        if self.process.poll() is not None:
            said = self.process.stderr.read().decode(errors="replace")
            raise RuntimeError(f"machine {self.number} ended: {said}{self.console.read_text(errors='replace')[-2000:]}")
        if time.monotonic() > end:
            raise RuntimeError(f"machine {self.number} does not answer: {self.asked} {self.pending.decode(errors='replace')}")

    def receive(self, end):
        self.alive(end)
        if select.select([self.shell], [], [], 0.5)[0]:
            self.pending += self.shell.recv(65536)

    def begin(self, script):
        """Starts a script on the machine; `end` returns its result."""
        self.counter += 1
        self.asked = script
        self.pending = b""
        self.shell.sendall(f"{{ {script}\n}} </dev/null 2>&1; echo \"@@$?@{self.counter}@\"\n".encode())

    def end(self, patience=60):
        """Waits for the script started by `begin`. Returns its status and output."""
        end = time.monotonic() + patience
        mark = f"@{self.counter}@\n".encode()
        while mark not in self.pending:
            self.receive(end)
        said = self.pending.split(mark)[0]
        text, _, status = said.rpartition(b"@@")
        return int(status), text.decode(errors="replace").replace("\r", "")

    def run(self, script, patience=60):
        """Runs a script on the machine. Returns its status and output."""
        self.begin(script)
        return self.end(patience)

    def must(self, script, patience=60):
        """Runs a script that must succeed. Returns its output."""
        status, text = self.run(script, patience)
        if status:
            raise RuntimeError(f"machine {self.number}: {script.splitlines()[0]}: exit {status}: {text.strip()}")
        return text

    def close(self):
        if self.shell:
            self.shell.close()
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


class Wire:
    """The hub between all machines: each frame that one machine sends goes to all others."""

    def __init__(self, folder, machines):
        self.ports, self.cards = [], []
        for number in range(1, machines + 1):
            port = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            port.bind(f"{folder}/wire{number}")
            self.ports.append(port)
            self.cards.append(f"{folder}/card{number}")
        self.ending, self.over = os.pipe()
        self.thread = threading.Thread(target=self.carry)
        self.thread.start()

    def carry(self):
        while True:
            ready = select.select([self.ending, *self.ports], [], [])[0]
            if self.ending in ready:
                return
            for port in ready:
                frame = port.recv(1 << 16)
                for other, card in zip(self.ports, self.cards):
                    if other is not port:
                        try:
                            other.sendto(frame, card)
                        except OSError:
                            pass  # A missing or slow network card loses frames, as on any wire.

    def close(self):
        os.write(self.over, b".")
        self.thread.join()
        for port in self.ports:
            port.close()
        os.close(self.ending)
        os.close(self.over)
