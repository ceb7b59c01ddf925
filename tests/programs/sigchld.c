/* Proves: one SIGCHLD for each child that ends, with the right siginfo; SA_NOCLDWAIT and ignoring
 * SIGCHLD reap children automatically. */
#include "program.h"

static volatile sig_atomic_t seen, wrong;
static volatile pid_t expected;

static void on(int signal, siginfo_t *info, void *context)
{
	(void)context;
	seen++;
	if (signal != SIGCHLD || info->si_pid != expected || info->si_code != CLD_EXITED || info->si_status != 17)
		wrong++;
}

int main(void)
{
	sigset_t chld, before;
	sigemptyset(&chld), sigaddset(&chld, SIGCHLD);
	int status;
	do {
		struct sigaction action = { .sa_sigaction = on, .sa_flags = SA_SIGINFO | SA_RESTART };
		CHECK_IS(sigaction(SIGCHLD, &action, NULL), 0);
		seen = 0;
		for (int i = 1; i <= 5; i++) {
			sigprocmask(SIG_BLOCK, &chld, &before);
			pid_t child = fork();
			CHECK(child >= 0);
			if (child == 0)
				_exit(17);
			expected = child;
			while (seen < i)
				sigsuspend(&before);
			sigprocmask(SIG_SETMASK, &before, NULL);
			CHECK_IS(seen, i);
			CHECK_IS(wrong, 0);
			await_exit(child, 17);
		}
		rest_ms(20);
		CHECK_IS(seen, 5); /* and not once more */

		signal(SIGCHLD, SIG_IGN);
		for (int i = 0; i < 3; i++) {
			pid_t child = fork();
			CHECK(child >= 0);
			if (child == 0)
				_exit(1);
		}
		CHECK_IS(wait(&status), -1); /* returns when all have ended */
		CHECK_IS(errno, ECHILD);
		signal(SIGCHLD, SIG_DFL);
	} while (going());
	return pass();
}
