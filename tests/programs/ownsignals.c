/* Proves: the handler of a signal raised by the process's own call has run when that call
 * returns: of kill, of a write to a pipe without readers, and of a mask change that unblocks a
 * pending signal. */
#include "program.h"

static volatile sig_atomic_t came;
static void on(int signal)
{
	(void)signal;
	came++;
}

int main(void)
{
	struct sigaction action = { .sa_handler = on };
	CHECK_IS(sigaction(SIGUSR1, &action, NULL), 0);
	CHECK_IS(sigaction(SIGPIPE, &action, NULL), 0);
	sigset_t usr1;
	sigemptyset(&usr1);
	sigaddset(&usr1, SIGUSR1);
	int ends[2];
	CHECK_IS(pipe(ends), 0);
	CHECK_IS(close(ends[0]), 0);
	do {
		for (int i = 0; i < 20; i++) {
			came = 0;
			CHECK_IS(kill(getpid(), SIGUSR1), 0);
			CHECK_IS(came, 1);
			CHECK_IS(write(ends[1], "x", 1), -1);
			CHECK_IS(errno, EPIPE);
			CHECK_IS(came, 2);
			CHECK_IS(sigprocmask(SIG_BLOCK, &usr1, NULL), 0);
			CHECK_IS(kill(getpid(), SIGUSR1), 0);
			CHECK_IS(came, 2);
			CHECK_IS(sigprocmask(SIG_UNBLOCK, &usr1, NULL), 0);
			CHECK_IS(came, 3);
		}
	} while (going());
	return pass();
}
