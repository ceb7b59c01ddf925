/* Tries: the call that its argument names, made by a jump to the stub's `syscall` instruction. No
 * return follows that instruction, so each call ends in a fault, whose handler takes the result. */
#include "hostile.h"
#include <sched.h>
#include <sys/socket.h>

static sigjmp_buf back;
static volatile long result;

static void fault(int signal, siginfo_t *info, void *context)
{
	(void)signal, (void)info;
	result = ((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX];
	siglongjmp(back, 1);
}

static long through(uintptr_t stub, long nr, long a, long b, long c)
{
	if (sigsetjmp(back, 1) == 0) {
		register long r10 __asm__("r10") = 0;
		register long r8 __asm__("r8") = 0;
		__asm__ volatile("jmp *%[stub]" ::[stub] "r"(stub), "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
				 : "rcx", "r11", "memory");
	}
	return result;
}

int main(int argc, char **argv)
{
	CHECK_IS(argc, 3);
	const char *what = argv[2];
	struct sigaction action = { .sa_sigaction = fault, .sa_flags = SA_SIGINFO | SA_NODEFER };
	CHECK_IS(sigaction(SIGSEGV, &action, NULL), 0);
	CHECK_IS(sigaction(SIGILL, &action, NULL), 0);
	CHECK_IS(sigaction(SIGBUS, &action, NULL), 0);
	ready();
	uintptr_t stub = find_range(argv[1]);
	CHECK(memcmp((void *)stub, "\x0f\x05", 2) == 0);
	long ret;
	if (strcmp(what, "getppid") == 0) {
		CHECK_IS(through(stub, SYS_getppid, 0, 0, 0), getppid());
	} else if (strcmp(what, "socket") == 0) {
		CHECK((ret = through(stub, SYS_socket, AF_INET, SOCK_STREAM, 0)) > 2);
		CHECK_IS(fcntl((int)ret, F_GETFD), 0);
	} else if (strcmp(what, "unshare") == 0) {
		through(stub, SYS_unshare, CLONE_NEWUSER, 0, 0);
	} else if (strcmp(what, "fork") == 0) {
		if ((ret = through(stub, SYS_clone, SIGCHLD, 0, 0)) == 0)
			_exit(7);
		CHECK(ret > 1);
		await_exit((pid_t)ret, 7);
	} else if (strcmp(what, "clone") == 0) {
		/* The call that the shim makes there itself, but unrequested. */
		if ((ret = through(stub, SYS_clone, CLONE_PARENT, 0, 0)) == 0)
			_exit(7);
	} else {
		fail("FAIL: %s is unknown\n", what);
	}
	done();
	return pass();
}
