# Modules, classes or single tests of Python's own test suite, with one line a test and without times. What differs
# natively from run to run is left out below, by name.
set -u
export LC_ALL=C PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0 TMPDIR=$PWD
run='
import sys, unittest
from test import support
# The chatter of some: which thread is first.
support.verbose = 0
# Tests that fail or vary in a node of a lab without a move, and why.
LEFT_OUT = {
    # Waits for a connection to the machine itself over vsock, which the kernel does not make without vsock_loopback.
    "ThreadedVSOCKSocketStreamTest.testStream",
    # A process beside the tests complains, or not yet, of what this one has taken from it, into the same output.
    "WithProcessesTestSharedMemory.test_shared_memory_cleaned_after_process_termination",
    # Its loop may be closed before the thread that waits for the child has said so, or after.
    "SubprocessThreadedWatcherTests.test_close_dont_kill_finished",
    # Fail if a poll takes 10 ms, which it does where the CPU is busy: as it is in a storm.
    "TestEPoll.test_control_and_wait",
    "TestEPoll.test_unregister_closed",
}
# NAME*N is so often one after the other, for what is quick; NAME PART is what has this in its name, for what is long.
name, _, part = sys.argv[1].partition(" ")
name, _, times = name.partition("*")
words = [name] * int(times or 1) + (["-k", part] if part else [])
class Loader(unittest.TestLoader):
    def getTestCaseNames(self, case):
        names = super().getTestCaseNames(case)
        return [name for name in names if f"{case.__qualname__}.{name}" not in LEFT_OUT]
unittest.main(module=None, testLoader=Loader(), argv=["unittest", "-v", *words])
'
for module; do
    /usr/bin/python3 -c "$run" "$module" >out 2>&1
    echo "$module: $?"
    sed -E -e 's/in [0-9.]+s$/in some time/' -e 's/0x[0-9a-f]+/ADDRESS/g' -e "s|$PWD|HERE|g" -e 's/AssertionError: [0-9]+ != [0-9]+/AssertionError: N != N/; s/resolution: [0-9.]+/resolution: N/; s/[Cc]hild \([0-9]+\)/child (N)/; s/test_[0-9]+_tmp/test_N_tmp/g' out
done
rm -f out
