/* Proves: alarm, setitimer (real, virtual, profiling) and POSIX timers expire when they should, as
 * often as they should. */
#include "program.h"
#include <sys/time.h>

static volatile sig_atomic_t count[65];
static void on(int signal) { count[signal]++; }

int main(void)
{
	struct sigaction action = { .sa_handler = on, .sa_flags = SA_RESTART };
	int used[] = { SIGALRM, SIGVTALRM, SIGPROF, SIGUSR1 };
	for (int i = 0; i < 4; i++)
		CHECK_IS(sigaction(used[i], &action, NULL), 0);
	sigset_t alarms, before;
	sigemptyset(&alarms), sigaddset(&alarms, SIGALRM);
	do {
		/* blocked except during the wait: an earlier signal would be missed */
		CHECK_IS(sigprocmask(SIG_BLOCK, &alarms, &before), 0);
		double begun = now();
		memset((void *)count, 0, sizeof count);
		CHECK_IS(alarm(100), 0);
		unsigned replaced = alarm(1);
		CHECK(replaced > 50 && replaced <= 100);
		while (!count[SIGALRM])
			sigsuspend(&before);
		CHECK_IS(sigprocmask(SIG_SETMASK, &before, NULL), 0);
		double took = now() - begun;
		CHECK(took > 0.98 && took < 8);
		CHECK_IS(count[SIGALRM], 1);
		CHECK_IS(alarm(0), 0);

		struct itimerval each = { { 0, 20000 }, { 0, 50000 } }, left;
		begun = now();
		CHECK_IS(setitimer(ITIMER_REAL, &each, NULL), 0);
		while (count[SIGALRM] < 11) {
			CHECK_IS(getitimer(ITIMER_REAL, &left), 0);
			CHECK(left.it_interval.tv_usec == 20000 && left.it_value.tv_usec <= 60000);
			pause();
		}
		took = now() - begun; /* ten expiries: 50 ms, and nine times 20 */
		CHECK(took > 0.22 && took < 8);
		memset(&each, 0, sizeof each);
		CHECK_IS(setitimer(ITIMER_REAL, &each, &left), 0);
		CHECK_IS(left.it_interval.tv_usec, 20000);

		/* by CPU time: these move with the program */
		struct itimerval cpu = { { 0, 20000 }, { 0, 20000 } };
		CHECK_IS(setitimer(ITIMER_VIRTUAL, &cpu, NULL), 0);
		CHECK_IS(setitimer(ITIMER_PROF, &cpu, NULL), 0);
		begun = now();
		while ((count[SIGVTALRM] < 2 || count[SIGPROF] < 2) && now() < begun + 20)
			;
		CHECK(count[SIGVTALRM] >= 2 && count[SIGPROF] >= 2);
		CHECK_IS(setitimer(ITIMER_VIRTUAL, &each, NULL), 0);
		CHECK_IS(setitimer(ITIMER_PROF, &each, NULL), 0);

		timer_t timer;
		struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1 };
		struct itimerspec once = { { 0, 0 }, { 0, 80000000 } }, rest;
		CHECK_IS(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
		begun = now();
		CHECK_IS(timer_settime(timer, 0, &once, NULL), 0);
		CHECK_IS(timer_gettime(timer, &rest), 0);
		CHECK(rest.it_value.tv_sec == 0 && rest.it_value.tv_nsec <= 80000000);
		while (!count[SIGUSR1])
			rest_ms(5);
		CHECK(now() - begun > 0.078);
		CHECK_IS(count[SIGUSR1], 1);
		CHECK_IS(timer_delete(timer), 0);
	} while (going());
	return pass();
}
