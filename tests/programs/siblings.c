/* Proves: the calls of one process take no longer because of what a relative of it does. With the argument
 * "transfers" the parent meanwhile reads its standard input, a file, again and again. The child prints its slowest
 * call to standard error if that took longer than TERN_SLOWEST seconds. */
#include "program.h"
#include <signal.h>
#include <sys/syscall.h>

static void child(void)
{
	double limit = getenv("TERN_SLOWEST") ? atof(getenv("TERN_SLOWEST")) : 900, slowest = 0;
	while (going()) {
		double begun = now();
		CHECK_IS(syscall(SYS_getppid), getppid());
		if (now() - begun > slowest)
			slowest = now() - begun;
		rest_ms(2);
	}
	if (slowest > limit)
		fail("a call took %.3f s\n", slowest);
	_exit(0);
}

int main(int argc, char **argv)
{
	bool transfers = argc > 1 && strcmp(argv[1], "transfers") == 0;
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (pid == 0)
		child();
	while (going()) {
		char block[64];
		if (transfers)
			CHECK_IS(pread(0, block, sizeof block, 0), sizeof block);
		rest_ms(5);
	}
	int status;
	CHECK_IS(waitpid(pid, &status, 0), pid);
	CHECK_IS(status, 0);
	return pass();
}
