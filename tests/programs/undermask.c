/* Proves: sigsuspend in a handler lets in a signal that the handler blocks; and a pselect whose
 * mask blocks more than the program's own restores that afterwards. */
#include "program.h"
#include <sys/select.h>
#include <sys/time.h>

static volatile sig_atomic_t depth, seen;
static void nest(int signal)
{
	seen++;
	if (depth++ == 0) {
		CHECK_IS(kill(getpid(), signal), 0);
		CHECK_IS(seen, 1);
		sigset_t none;
		sigemptyset(&none);
		CHECK_IS(sigsuspend(&none), -1);
		CHECK_IS(errno, EINTR);
		CHECK_IS(seen, 2);
	}
	depth--;
}
static void on(int signal) { (void)signal; }

int main(void)
{
	struct sigaction nests = { .sa_handler = nest }, alarmed = { .sa_handler = on, .sa_flags = SA_RESTART };
	CHECK_IS(sigaction(SIGUSR1, &nests, NULL), 0);
	CHECK_IS(sigaction(SIGALRM, &alarmed, NULL), 0);
	sigset_t alarms, mine;
	sigemptyset(&alarms);
	sigaddset(&alarms, SIGALRM);
	struct itimerval often = { { 0, 1300 }, { 0, 1300 } }, never = { { 0, 0 }, { 0, 0 } };
	do {
		seen = 0;
		CHECK_IS(raise(SIGUSR1), 0);
		CHECK_IS(seen, 2);
		CHECK_IS(setitimer(ITIMER_REAL, &often, NULL), 0);
		for (int i = 0; i < 10; i++) {
			struct timespec limit = { 0, 400000 };
			pselect(0, NULL, NULL, NULL, &limit, &alarms);
			CHECK_IS(sigprocmask(SIG_BLOCK, NULL, &mine), 0);
			CHECK_IS(sigismember(&mine, SIGALRM), 0);
		}
		CHECK_IS(setitimer(ITIMER_REAL, &never, NULL), 0);
	} while (going());
	return pass();
}
