/* Proves: nanosleep, clock_nanosleep (relative, absolute) and usleep-like waits last as long as
 * they should in sum, also when they are moved or interrupted, and the remaining time after an
 * interruption is right. */
#include "program.h"
#include <sys/time.h>

static void on(int signal) { (void)signal; }

int main(void)
{
	struct sigaction action = { .sa_handler = on };
	CHECK_IS(sigaction(SIGALRM, &action, NULL), 0);
	do {
		double begun = now();
		struct timespec t = { 0, 300000000 }, rest = { 0, 0 };
		CHECK_IS(nanosleep(&t, NULL), 0);
		double took = now() - begun;
		CHECK(took >= 0.3 && took < 6);

		begun = now();
		CHECK_IS(clock_nanosleep(CLOCK_MONOTONIC, 0, &t, &rest), 0);
		CHECK(now() - begun >= 0.3);

		struct timespec until;
		CHECK_IS(clock_gettime(CLOCK_MONOTONIC, &until), 0);
		until.tv_nsec += 250000000;
		if (until.tv_nsec >= 1000000000)
			until.tv_sec++, until.tv_nsec -= 1000000000;
		CHECK_IS(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL), 0);
		took = now() - ((double)until.tv_sec + (double)until.tv_nsec / 1e9);
		CHECK(took >= 0 && took < 6);

		/* interrupted by an alarm (by its next one, if the first came before the sleep):
		 * the remaining and the elapsed time add up to the whole */
		begun = now();
		struct timespec lasting = { 30, 0 };
		struct itimerval each = { { 1, 0 }, { 1, 0 } }, none = { { 0, 0 }, { 0, 0 } };
		CHECK_IS(setitimer(ITIMER_REAL, &each, NULL), 0);
		CHECK_IS(nanosleep(&lasting, &rest), -1);
		CHECK_IS(errno, EINTR);
		took = now() - begun + (double)rest.tv_sec + (double)rest.tv_nsec / 1e9;
		CHECK(took > 29.9 && took < 36);
		CHECK_IS(setitimer(ITIMER_REAL, &none, NULL), 0);
		struct timespec wrong = { 0, 2000000000 };
		CHECK_IS(nanosleep(&wrong, NULL), -1);
		CHECK_IS(errno, EINVAL);
	} while (going());
	return pass();
}
