/* Proves: sigsuspend in a handler lets in a signal that the handler blocks; and a pselect whose
 * mask blocks more than the program's own restores that afterwards. */
#include "program.h"
#include <sys/select.h>
#include <sys/syscall.h>
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

/* Of several signals of a number only the first ends the call; the others stay pending. */
static void count(int signal)
{
	(void)signal;
	seen++;
}

static void one_at_a_time(int signal, bool polls)
{
	sigset_t set, none, waiting;
	struct timespec long_time = { 60, 0 };
	sigemptyset(&none), sigemptyset(&set), sigaddset(&set, signal);
	CHECK_IS(sigprocmask(SIG_BLOCK, &set, NULL), 0);
	seen = 0;
	for (int i = 0; i < 3; i++)
		CHECK_IS(i % 2 ? kill(getpid(), signal) : syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), signal), 0);
	CHECK_IS(polls ? pselect(0, NULL, NULL, NULL, &long_time, &none) : sigsuspend(&none), -1);
	CHECK_IS(errno, EINTR);
	CHECK_IS(seen, 1);
	CHECK_IS(sigpending(&waiting), 0);
	CHECK(sigismember(&waiting, signal));
	CHECK_IS(sigtimedwait(&set, NULL, &long_time), signal);
	CHECK_IS(sigprocmask(SIG_UNBLOCK, &set, NULL), 0);
	CHECK_IS(seen, signal < SIGRTMIN ? 1 : 2);
}

int main(void)
{
	struct sigaction nests = { .sa_handler = nest }, alarmed = { .sa_handler = on, .sa_flags = SA_RESTART };
	CHECK_IS(sigaction(SIGUSR1, &nests, NULL), 0);
	CHECK_IS(sigaction(SIGALRM, &alarmed, NULL), 0);
	struct sigaction counts = { .sa_handler = count };
	CHECK_IS(sigaction(SIGUSR2, &counts, NULL), 0);
	CHECK_IS(sigaction(SIGRTMIN + 2, &counts, NULL), 0);
	sigset_t alarms, mine;
	sigemptyset(&alarms);
	sigaddset(&alarms, SIGALRM);
	struct itimerval often = { { 0, 1300 }, { 0, 1300 } }, never = { { 0, 0 }, { 0, 0 } };
	do {
		seen = 0;
		CHECK_IS(raise(SIGUSR1), 0);
		CHECK_IS(seen, 2);
		for (int i = 0; i < 4; i++)
			one_at_a_time(i % 2 ? SIGUSR2 : SIGRTMIN + 2, i / 2);
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
