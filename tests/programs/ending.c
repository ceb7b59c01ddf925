/* Proves: each way to end arrives at home: the argument says which. Works for a while first.
 * exit N | abort | kill | term | segv | fpe | pipe | orphan (ends while a child still writes) */
#include "program.h"
#include <sys/resource.h>

int main(int argc, char **argv)
{
	if (argc < 2)
		fail("usage: ending exit N | abort | kill | term | segv | fpe | pipe | orphan\n");
	struct rlimit none = { 0, 0 };
	setrlimit(RLIMIT_CORE, &none);
	volatile uint64_t work = 0;
	do
		for (int i = 0; i < 100000; i++)
			work += (uint64_t)i;
	while (going());
	say("ending by %s\n", argv[1]);
	if (strcmp(argv[1], "exit") == 0)
		exit(argc > 2 ? atoi(argv[2]) : 0);
	if (strcmp(argv[1], "abort") == 0)
		abort();
	if (strcmp(argv[1], "kill") == 0)
		kill(getpid(), SIGKILL);
	if (strcmp(argv[1], "term") == 0)
		raise(SIGTERM);
	if (strcmp(argv[1], "segv") == 0)
		*(volatile char *)(getpid() > 0 ? 16UL : 0UL) = 1;
	if (strcmp(argv[1], "fpe") == 0)
		__asm__ volatile("xor %%ecx, %%ecx\n\tmov $1, %%eax\n\tcltd\n\tidiv %%ecx" ::: "eax", "ecx", "edx", "cc");
	if (strcmp(argv[1], "pipe") == 0) {
		int ends[2];
		CHECK_IS(pipe(ends), 0);
		close(ends[0]);
		write(ends[1], "x", 1);
	}
	if (strcmp(argv[1], "orphan") == 0) {
		pid_t parent = getpid(), child = fork();
		CHECK(child >= 0);
		if (child)
			_exit(4);
		while (getppid() == parent)
			rest_ms(5);
		say("the child outlived it\n");
		_exit(0);
	}
	fail("FAIL: still here\n");
}
