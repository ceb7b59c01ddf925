/* Proves: timers on CPU time (ITIMER_PROF, ITIMER_VIRTUAL, timer_create on the clocks of the
 * process, of a thread and by their ids, RLIMIT_CPU) expire when that much was used, wherever it
 * was: not before, not twice, with the right remaining time and siginfo; blocked, waited for,
 * across exec and not across fork; and they end a program that has no handler.
 *
 * At home again, a program gets only home's part of its CPU time (docs/reference/limits.md), but its timers
 * continue with what is left: so time is measured here by the timers' values. */
#include "program.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>

static volatile sig_atomic_t count[65], code[65], overrun;
static volatile sig_atomic_t value;
static const double limit = 60;

static void on(int signal, siginfo_t *info, void *context)
{
	(void)context;
	count[signal]++;
	code[signal] = info->si_code;
	if (info->si_code == SI_TIMER) {
		value = info->si_value.sival_int;
		overrun = info->si_overrun;
	}
}

static volatile uint64_t work;

static void compute_a_little(void)
{
	for (int i = 0; i < 200 * 1000; i++)
		work += (uint64_t)i;
}

/* Computes until the signal has come this often, without sleeping: only CPU time advances a
 * timer. */
static void compute_until(int signal, int times)
{
	double begun = now();
	while (count[signal] < times) {
		compute_a_little();
		if (now() > begun + limit)
			fail("FAIL: signal %d has come %d times of %d\n", signal, (int)count[signal], times);
	}
}

static double seconds(struct timeval t) { return (double)t.tv_sec + (double)t.tv_usec / 1e6; }

static double left(int which)
{
	struct itimerval t;
	CHECK_IS(getitimer(which, &t), 0);
	return seconds(t.it_value);
}

static void interval(int which, int signal)
{
	struct itimerval each = { { 0, 20000 }, { 0, 60000 } }, none = { { 0, 0 }, { 0, 0 } }, old;
	count[signal] = 0;
	CHECK_IS(setitimer(which, &none, NULL), 0);
	CHECK_IS(setitimer(which, &each, NULL), 0);
	CHECK(left(which) > 0);
	CHECK(left(which) < 0.1);
	compute_until(signal, 3);
	CHECK_IS(code[signal], SI_KERNEL);
	CHECK(left(which) > 0);
	CHECK(left(which) < 0.06);
	CHECK_IS(setitimer(which, &none, &old), 0);
	CHECK_IS(old.it_interval.tv_usec, 20000);
	CHECK_IS(left(which), 0);
	/* A signal that was pending comes with the next call. */
	int had = count[signal];
	for (int i = 0; i < 60; i++)
		compute_a_little();
	CHECK_IS(count[signal], had);

	/* The remaining time decreases only with CPU time. */
	struct itimerval far = { { 0, 0 }, { 100, 0 } };
	CHECK_IS(setitimer(which, &far, NULL), 0);
	double before = left(which);
	rest_ms(20);
	double after = left(which);
	CHECK(after <= before && after > before - 1);
	double begun = now();
	while (left(which) >= after) {
		compute_a_little();
		CHECK(now() < begun + limit);
	}
	CHECK_IS(setitimer(which, &none, NULL), 0);

	struct itimerval bad = { { 0, 0 }, { 0, 1000000 } };
	CHECK_IS(setitimer(which, &bad, NULL), -1);
	CHECK_IS(errno, EINVAL);
}

static void posix(clockid_t clock, int notify)
{
	struct sigevent event = { .sigev_notify = notify, .sigev_signo = SIGUSR1 };
	event.sigev_value.sival_int = 4711;
	/* sigev_notify_thread_id, which has another name in each libc */
	int own = (int)syscall(SYS_gettid), timer;
	if (notify == SIGEV_THREAD_ID)
		memcpy((char *)&event + 16, &own, sizeof own);
	struct itimerspec each = { { 0, 15000000 }, { 0, 40000000 } }, none = { { 0, 0 }, { 0, 0 } }, rest;
	count[SIGUSR1] = 0;
	CHECK_IS(syscall(SYS_timer_create, clock, &event, &timer), 0);
	CHECK_IS(syscall(SYS_timer_gettime, timer, &rest), 0);
	CHECK(rest.it_value.tv_sec == 0 && rest.it_value.tv_nsec == 0);
	CHECK_IS(syscall(SYS_timer_settime, timer, 0, &each, NULL), 0);
	CHECK_IS(syscall(SYS_timer_gettime, timer, &rest), 0);
	CHECK(rest.it_value.tv_sec == 0 && rest.it_value.tv_nsec <= 40000000);
	CHECK_IS(rest.it_interval.tv_nsec, 15000000);
	if (notify == SIGEV_NONE) {
		/* It counts, and reports on request. */
		struct itimerspec once = { { 0, 0 }, { 0, 40000000 } };
		CHECK_IS(syscall(SYS_timer_settime, timer, 0, &once, NULL), 0);
		double begun = now();
		do {
			compute_a_little();
			CHECK_IS(syscall(SYS_timer_gettime, timer, &rest), 0);
			CHECK(now() < begun + limit);
		} while (rest.it_value.tv_nsec > 1);
		CHECK_IS(count[SIGUSR1], 0);
	} else {
		compute_until(SIGUSR1, 3);
		CHECK_IS(code[SIGUSR1], SI_TIMER);
		CHECK_IS(value, 4711);
		CHECK(overrun >= 0 && syscall(SYS_timer_getoverrun, timer) >= 0);
		CHECK_IS(syscall(SYS_timer_settime, timer, 0, &none, &rest), 0);
		CHECK_IS(rest.it_interval.tv_nsec, 15000000);
		/* At a time in the past. */
		int had = count[SIGUSR1];
		struct itimerspec past = { { 0, 0 }, { 0, 1 } };
		CHECK_IS(syscall(SYS_timer_settime, timer, TIMER_ABSTIME, &past, NULL), 0);
		compute_until(SIGUSR1, had + 1);
		CHECK_IS(count[SIGUSR1], had + 1);
	}
	CHECK_IS(syscall(SYS_timer_delete, timer), 0);
	CHECK_IS(syscall(SYS_timer_gettime, timer, &rest), -1);
	CHECK_IS(errno, EINVAL);
}

static atomic_bool enough;

static void *other(void *unused)
{
	(void)unused;
	while (!enough)
		compute_a_little();
	return NULL;
}

/* A timer on another thread's clock, and one on the own clock of a sleeping thread: only the first
 * ever expires. */
static void threads(void)
{
	pthread_t thread;
	clockid_t clock;
	struct sigevent busy = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1 };
	struct sigevent idle = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR2 };
	int timers[2];
	struct itimerspec each = { { 0, 10000000 }, { 0, 50000000 } }, far = { { 0, 0 }, { 20, 0 } }, rest;
	count[SIGUSR1] = 0;
	enough = false;
	CHECK_IS(pthread_create(&thread, NULL, other, NULL), 0);
	CHECK_IS(pthread_getcpuclockid(thread, &clock), 0);
	CHECK_IS(syscall(SYS_timer_create, clock, &busy, &timers[0]), 0);
	CHECK_IS(syscall(SYS_timer_create, CLOCK_THREAD_CPUTIME_ID, &idle, &timers[1]), 0);
	CHECK_IS(syscall(SYS_timer_settime, timers[1], 0, &far, NULL), 0);
	CHECK_IS(syscall(SYS_timer_settime, timers[0], 0, &each, NULL), 0);
	double begun = now();
	while (count[SIGUSR1] < 3) {
		rest_ms(5);
		CHECK(now() < begun + limit);
	}
	CHECK_IS(syscall(SYS_timer_gettime, timers[0], &rest), 0);
	CHECK_IS(rest.it_interval.tv_nsec, 10000000);
	CHECK_IS(syscall(SYS_timer_gettime, timers[1], &rest), 0);
	CHECK(rest.it_value.tv_sec >= 10 && rest.it_value.tv_sec <= 20);
	CHECK_IS(syscall(SYS_timer_delete, timers[0]), 0);
	CHECK_IS(syscall(SYS_timer_delete, timers[1]), 0);
	enough = true;
	CHECK_IS(pthread_join(thread, NULL), 0);
}

/* A blocked signal is pending once, and is taken by a wait. */
static void blocked(void)
{
	sigset_t set, before;
	siginfo_t info;
	struct timespec moment = { 0, 0 };
	sigemptyset(&set);
	sigaddset(&set, SIGPROF);
	sigaddset(&set, SIGUSR1);
	CHECK_IS(sigprocmask(SIG_BLOCK, &set, &before), 0);
	struct itimerval each = { { 0, 10000 }, { 0, 10000 } }, none = { { 0, 0 }, { 0, 0 } };
	CHECK_IS(setitimer(ITIMER_PROF, &each, NULL), 0);
	double begun = now();
	sigset_t waiting;
	do {
		compute_a_little();
		CHECK_IS(sigpending(&waiting), 0);
		CHECK(now() < begun + limit);
	} while (!sigismember(&waiting, SIGPROF));
	for (int i = 0; i < 200; i++)
		compute_a_little();
	CHECK_IS(setitimer(ITIMER_PROF, &none, NULL), 0);
	CHECK_IS(sigtimedwait(&set, &info, &moment), SIGPROF);
	CHECK_IS(info.si_code, SI_KERNEL);
	CHECK_IS(sigtimedwait(&set, &info, &moment), -1);
	CHECK_IS(errno, EAGAIN);

	/* A handler gets the number of overruns. */
	struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1 };
	int timer;
	struct itimerspec fast = { { 0, 5000000 }, { 0, 5000000 } };
	count[SIGUSR1] = 0;
	CHECK_IS(syscall(SYS_timer_create, CLOCK_PROCESS_CPUTIME_ID, &event, &timer), 0);
	CHECK_IS(syscall(SYS_timer_settime, timer, 0, &fast, NULL), 0);
	do {
		compute_a_little();
		CHECK_IS(sigpending(&waiting), 0);
		CHECK(now() < begun + 2 * limit);
	} while (!sigismember(&waiting, SIGUSR1));
	CHECK_IS(sigprocmask(SIG_SETMASK, &before, NULL), 0);
	compute_until(SIGUSR1, 1);
	CHECK_IS(syscall(SYS_timer_delete, timer), 0);
}

/* A child that does not inherit the timer, and one that is ended by its own. */
static void children(void)
{
	struct itimerval far = { { 0, 0 }, { 50, 0 } }, none = { { 0, 0 }, { 0, 0 } }, soon = { { 0, 0 }, { 0, 30000 } };
	int status;
	CHECK_IS(setitimer(ITIMER_PROF, &far, NULL), 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0)
		_exit(left(ITIMER_PROF) == 0 ? 5 : 6);
	await_exit(child, 5);
	CHECK(left(ITIMER_PROF) > 1);
	CHECK_IS(setitimer(ITIMER_PROF, &none, NULL), 0);

	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		signal(SIGVTALRM, SIG_DFL);
		CHECK_IS(setitimer(ITIMER_VIRTUAL, &soon, NULL), 0);
		compute_until(SIGVTALRM, 1 << 30);
	}
	CHECK_IS(waitpid(child, &status, 0), child);
	CHECK(WIFSIGNALED(status));
	CHECK_IS(WTERMSIG(status), SIGVTALRM);
}

/* The program that an execve starts keeps this program's timer and limit. */
static void replaced(char **argv)
{
	struct itimerval soon = { { 0, 0 }, { 0, 150000 } };
	int status;
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		signal(SIGPROF, SIG_DFL);
		CHECK_IS(setitimer(ITIMER_PROF, &soon, NULL), 0);
		execl(argv[0], argv[0], "goes on", NULL);
		_exit(9);
	}
	CHECK_IS(waitpid(child, &status, 0), child);
	CHECK(WIFSIGNALED(status));
	CHECK_IS(WTERMSIG(status), SIGPROF);
}

/* SIGXCPU after a second of CPU time. If it does not come, SIGKILL does after two, however long
 * they take: with forty programs on two CPUs that can be minutes. */
static void limited(void)
{
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		struct rlimit limits = { 1, 2 };
		count[SIGXCPU] = 0;
		CHECK_IS(setrlimit(RLIMIT_CPU, &limits), 0);
		while (count[SIGXCPU] == 0)
			compute_a_little();
		CHECK_IS(code[SIGXCPU], SI_KERNEL);
		_exit(7);
	}
	await_exit(child, 7);
}

int main(int argc, char **argv)
{
	if (argc > 1)
		compute_until(SIGPROF, 1 << 30);
	struct sigaction action = { .sa_sigaction = on, .sa_flags = SA_RESTART | SA_SIGINFO };
	int used[] = { SIGVTALRM, SIGPROF, SIGUSR1, SIGXCPU };
	for (int i = 0; i < 4; i++)
		CHECK_IS(sigaction(used[i], &action, NULL), 0);
	clockid_t own, thread = (clockid_t)((~(unsigned)syscall(SYS_gettid) << 3) | 6);
	CHECK_IS(clock_getcpuclockid(0, &own), 0);
	do {
		interval(ITIMER_PROF, SIGPROF);
		interval(ITIMER_VIRTUAL, SIGVTALRM);
		posix(CLOCK_PROCESS_CPUTIME_ID, SIGEV_SIGNAL);
		posix(CLOCK_THREAD_CPUTIME_ID, SIGEV_THREAD_ID);
		posix(own, SIGEV_NONE);
		posix(thread, SIGEV_SIGNAL);
		threads();
		blocked();
		children();
		replaced(argv);
	} while (going());
	limited();
	return pass();
}
