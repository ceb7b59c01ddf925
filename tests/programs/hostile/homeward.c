/* Tries: the call that its argument names, which only home can make. It prints the result, which
 * must be that at home. */
#include "hostile.h"
#include <linux/bpf.h>
#include <linux/perf_event.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

static void tell(const char *what, long ret)
{
	say("%s: %s %d\n", what, ret >= 0 ? "done" : "refused", ret >= 0 ? 0 : errno);
}

int main(int argc, char **argv)
{
	CHECK_IS(argc, 3);
	const char *what = argv[2];
	/* Stays at home. */
	pid_t child = fork();
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (;;)
			pause();
	}
	char own_user[64] = { 0 }, then_user[64] = { 0 };
	CHECK(readlink("/proc/self/ns/net", own_user, sizeof own_user - 1) > 0);
	ready();
	if (strcmp(what, "unshare") == 0) {
		tell(what, syscall(SYS_unshare, CLONE_NEWNET | CLONE_NEWUTS));
	} else if (strcmp(what, "setns") == 0) {
		int fd = open("/proc/1/ns/net", O_RDONLY);
		tell(what, syscall(SYS_setns, fd, CLONE_NEWNET));
	} else if (strcmp(what, "clone") == 0) {
		long ret = syscall(SYS_clone, CLONE_NEWUSER | CLONE_NEWPID | SIGCHLD, 0, 0, 0, 0);
		if (ret == 0)
			_exit(0);
		tell(what, ret);
		CHECK(ret < 0 || waitpid((pid_t)ret, NULL, 0) == ret);
	} else if (strcmp(what, "ptrace") == 0) {
		tell(what, syscall(SYS_ptrace, PTRACE_SEIZE, child, 0, 0));
	} else if (strcmp(what, "writev") == 0) {
		long zero = 0;
		struct iovec here = { &zero, sizeof zero }, there = { &zero, sizeof zero };
		tell(what, syscall(SYS_process_vm_writev, child, &here, 1, &there, 1, 0));
		/* Pid 1 on its node is the sandbox helper. */
		tell(what, syscall(SYS_process_vm_writev, 1, &here, 1, (struct iovec[]){ { own_user, 8 } }, 1, 99));
	} else if (strcmp(what, "bpf") == 0) {
		union bpf_attr attr = { .map_type = 99 };
		tell(what, syscall(SYS_bpf, BPF_MAP_CREATE, &attr, sizeof attr));
	} else if (strcmp(what, "perf") == 0) {
		struct perf_event_attr attr = { .type = 99, .size = sizeof attr };
		tell(what, syscall(SYS_perf_event_open, &attr, 0, -1, -1, 0));
	} else {
		fail("FAIL: %s is unknown\n", what);
	}
	CHECK(readlink("/proc/self/ns/net", then_user, sizeof then_user - 1) > 0);
	say("net: %s\n", strcmp(own_user, then_user) == 0 ? "as before" : "another");
	done();
	kill(child, SIGKILL);
	CHECK_IS(waitpid(child, NULL, __WALL), child);
	return pass();
}
