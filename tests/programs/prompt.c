/* Proves: a signal that is sent as soon as the effect of a call is visible interrupts the next call
 * or comes before it; it is never missed. The parent answers every byte of its child with a signal,
 * while the child begins to read from an empty pipe. A parent at home is faster than anything
 * between the child and its home. */
#include "program.h"
#include <setjmp.h>

enum { ROUNDS = 400 };

static sigjmp_buf away;
static void leave(int signal) { siglongjmp(away, signal); }

static void prompt(int words, int never)
{
	struct sigaction action = { .sa_handler = leave };
	CHECK_IS(sigaction(SIGUSR1, &action, NULL), 0);
	/* in memory, as longjmp leaves it */
	volatile int round;
	for (round = 0; round < ROUNDS; round++)
		if (sigsetjmp(away, 1) == 0) {
			CHECK_IS(write(words, "x", 1), 1);
			char byte;
			ssize_t n = read(never, &byte, 1);
			fail("FAIL: a read that was to be interrupted ended with %zd\n", n);
		}
	_exit(21);
}

int main(void)
{
	do {
		int words[2], never[2];
		CHECK_IS(pipe(words) | pipe(never), 0);
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0)
			prompt(words[1], never[0]);
		close(words[1]);
		char byte;
		for (ssize_t n; (n = read(words[0], &byte, 1)) != 0;) {
			CHECK_IS(n, 1);
			CHECK_IS(kill(child, SIGUSR1), 0);
		}
		int status;
		CHECK_IS(waitpid(child, &status, 0), child);
		CHECK(WIFEXITED(status));
		CHECK_IS(WEXITSTATUS(status), 21);
		close(words[0]), close(never[0]), close(never[1]);
	} while (going());
	return pass();
}
