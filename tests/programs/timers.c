/* Proves: POSIX timers of the real, monotonic and boot clocks: intervals and overruns, absolute
 * times, to a thread, without notification; sleeps until a time; resolution of clocks; no expiry is
 * lost, early or doubled by a move. */
#include "program.h"
#include <pthread.h>
#include <sys/syscall.h>

static volatile sig_atomic_t count[65], value, by;

static void on(int signal, siginfo_t *info, void *context)
{
	(void)context;
	count[signal]++;
	value = info->si_value.sival_int;
	by = info->si_code;
}

static double at(clockid_t clock)
{
	struct timespec t;
	CHECK_IS(clock_gettime(clock, &t), 0);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static struct timespec of(double seconds)
{
	return (struct timespec){ (time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9) };
}

int main(void)
{
	static const clockid_t clocks[] = { CLOCK_REALTIME, CLOCK_MONOTONIC, CLOCK_BOOTTIME };
	struct sigaction action = { .sa_sigaction = on, .sa_flags = SA_SIGINFO };
	CHECK(sigaction(SIGUSR1, &action, NULL) == 0 && sigaction(SIGRTMIN + 1, &action, NULL) == 0);
	struct timespec fine;
	/* one for the whole run: every 50 ms, with overruns counted */
	timer_t steady, timer;
	struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 1, .sigev_value.sival_int = 77 };
	struct itimerspec each = { of(0.05), of(0.05) }, once, rest;
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN + 1);
	CHECK_IS(sigprocmask(SIG_BLOCK, &set, NULL), 0);
	CHECK_IS(timer_create(CLOCK_MONOTONIC, &event, &steady), 0);
	double begun = at(CLOCK_MONOTONIC);
	CHECK_IS(timer_settime(steady, 0, &each, NULL), 0);
	double armed = at(CLOCK_MONOTONIC);
	long ticks = 0;
	do {
		for (int i = 0; i < 3; i++) {
			clockid_t clock = clocks[i];
			CHECK_IS(clock_getres(clock, &fine), 0);
			CHECK(fine.tv_sec == 0 && fine.tv_nsec <= 10000000);
			/* absolute, by the clock itself; then the remaining time */
			event.sigev_signo = SIGUSR1, event.sigev_value.sival_int = i;
			event.sigev_notify = SIGEV_SIGNAL;
			CHECK_IS(timer_create(clock, &event, &timer), 0);
			double until = at(clock) + 0.03;
			once = (struct itimerspec){ { 0, 0 }, of(until) };
			count[SIGUSR1] = 0;
			CHECK_IS(timer_settime(timer, TIMER_ABSTIME, &once, NULL), 0);
			CHECK_IS(timer_gettime(timer, &rest), 0);
			CHECK(rest.it_value.tv_sec == 0 && rest.it_value.tv_nsec <= 30100000);
			while (!count[SIGUSR1])
				rest_ms(1);
			double came = at(clock);
			if (came < until - 0.0005)
				fail("FAIL clock %d: %.6f s before its time came %d signals of value %d, code %d\n", (int)clock,
				     until - came, (int)count[SIGUSR1], (int)value, (int)by);
			CHECK(count[SIGUSR1] == 1 && value == i && by == SI_TIMER);
			CHECK_IS(timer_gettime(timer, &rest), 0);
			CHECK(rest.it_value.tv_sec == 0 && rest.it_value.tv_nsec == 0);
			CHECK_IS(timer_delete(timer), 0);
			CHECK_IS(syscall(SYS_timer_gettime, timer, &rest), -1);
			CHECK_IS(errno, EINVAL);
			/* sleeps until then; a past time needs no sleep */
			struct timespec when = of(at(clock) + 0.02);
			CHECK_IS(clock_nanosleep(clock, TIMER_ABSTIME, &when, NULL), 0);
			CHECK(at(clock) >= (double)when.tv_sec + (double)when.tv_nsec / 1e9 - 0.0005);
			CHECK_IS(clock_nanosleep(clock, TIMER_ABSTIME, &when, NULL), 0);
		}
		/* to this thread */
		memset(&event, 0, sizeof event);
		event.sigev_notify = SIGEV_THREAD_ID, event.sigev_signo = SIGUSR1, event.sigev_value.sival_int = 9;
		((int *)&event)[4] = (int)syscall(SYS_gettid);
		count[SIGUSR1] = 0;
		CHECK_IS(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
		once = (struct itimerspec){ { 0, 0 }, of(0.01) };
		CHECK_IS(timer_settime(timer, 0, &once, NULL), 0);
		while (!count[SIGUSR1])
			rest_ms(1);
		CHECK(count[SIGUSR1] == 1 && value == 9);
		CHECK_IS(timer_delete(timer), 0);
		/* no notification: only queried */
		memset(&event, 0, sizeof event);
		event.sigev_notify = SIGEV_NONE;
		CHECK_IS(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
		once = (struct itimerspec){ of(10), of(100) };
		CHECK_IS(timer_settime(timer, 0, &once, NULL), 0);
		rest_ms(10);
		CHECK_IS(timer_gettime(timer, &rest), 0);
		double left = (double)rest.it_value.tv_sec + (double)rest.it_value.tv_nsec / 1e9;
		CHECK(left <= 99.99 && left > 85 && rest.it_interval.tv_sec == 10);
		CHECK_IS(timer_settime(timer, 0, &once, &rest), 0);
		CHECK_IS(rest.it_interval.tv_sec, 10);
		CHECK_IS(timer_delete(timer), 0);
		event.sigev_notify = 55;
		CHECK_IS(timer_create(CLOCK_MONOTONIC, &event, &timer), -1);
		CHECK_IS(errno, EINVAL);
		/* a child inherits none */
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			CHECK_IS(syscall(SYS_timer_gettime, 0, &rest), -1);
			_exit(errno == EINVAL ? 4 : 5);
		}
		await_exit(child, 4);
		/* expiries of the steady timer so far: signals received and their overruns */
		siginfo_t info;
		struct timespec nothing = { 0, 0 };
		int got = sigtimedwait(&set, &info, &nothing);
		if (got > 0) {
			CHECK(info.si_value.sival_int == 77 && info.si_code == SI_TIMER);
			ticks += 1 + info.si_overrun;
		}
	} while (going());
	/* all expiries, including overruns: one for each 50 ms of the time, except pending ones */
	double least = at(CLOCK_MONOTONIC) - armed;
	siginfo_t info;
	struct timespec moment = of(0.2);
	CHECK_IS(sigtimedwait(&set, &info, &moment), SIGRTMIN + 1);
	ticks += 1 + info.si_overrun;
	double most = at(CLOCK_MONOTONIC) - begun;
	if ((double)ticks < least / 0.05 - 2 || (double)ticks > most / 0.05 + 2)
		fail("FAIL %ld ticks in %.3f to %.3f s\n", ticks, least, most);
	return pass();
}
