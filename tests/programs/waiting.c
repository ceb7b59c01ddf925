/* Proves: calls that wait with a time limit last exactly as long as they should, also when the
 * process moves during one: those that the kernel continues by itself (sleeps, polls), and one
 * that an interruption makes fail with EINTR (epoll_wait).
 *
 *   waiting [SECONDS [one]]   each call waits for so long (default 0.3); one: a poll alone
 */
#include "program.h"
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/select.h>

/* A busy machine may resume a thread late. */
#define LATEST 3.0

static double seconds = 0.3;
static int ends[2];

static struct timespec timespec_of(double s)
{
	return (struct timespec){ (time_t)s, (long)((s - (double)(time_t)s) * 1e9) };
}

static void check_time(double begun, const char *what)
{
	double took = now() - begun;
	if (took < seconds - 0.002 || took > seconds + LATEST)
		fail("%s took %.3f instead of %.3f s\n", what, took, seconds);
}

static void *sleeps(void *argument)
{
	double begun = now();
	struct timespec time = timespec_of(seconds);
	CHECK_IS(nanosleep(&time, NULL), 0);
	check_time(begun, "nanosleep");
	return argument;
}

static void *sleeps_until(void *argument)
{
	double begun = now();
	struct timespec until = timespec_of(begun + seconds);
	CHECK_IS(clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL), 0);
	check_time(begun, "clock_nanosleep");
	return argument;
}

static void *polls(void *argument)
{
	struct pollfd waits = { .fd = ends[0], .events = POLLIN };
	double begun = now();
	CHECK_IS(poll(&waits, 1, (int)(seconds * 1000)), 0);
	CHECK_IS(waits.revents, 0);
	check_time(begun, "poll");
	return argument;
}

static void *selects(void *argument)
{
	fd_set set;
	FD_ZERO(&set);
	FD_SET(ends[0], &set);
	struct timespec time = timespec_of(seconds);
	double begun = now();
	CHECK_IS(pselect(ends[0] + 1, &set, NULL, NULL, &time, NULL), 0);
	CHECK(!FD_ISSET(ends[0], &set));
	check_time(begun, "pselect");
	return argument;
}

static void *epolls(void *argument)
{
	struct epoll_event event = { .events = EPOLLIN, .data.u64 = 7 };
	int epoll = epoll_create1(0);
	CHECK(epoll >= 0);
	CHECK_IS(epoll_ctl(epoll, EPOLL_CTL_ADD, ends[0], &event), 0);
	double begun = now();
	CHECK_IS(epoll_wait(epoll, &event, 1, (int)(seconds * 1000)), 0);
	check_time(begun, "epoll_wait");
	CHECK_IS(close(epoll), 0);
	return argument;
}

int main(int argc, char **argv)
{
	void *(*kinds[])(void *) = { sleeps, sleeps_until, polls, selects, epolls };
	enum { KINDS = sizeof kinds / sizeof *kinds };
	if (argc > 1)
		seconds = atof(argv[1]);
	CHECK_IS(pipe(ends), 0);
	if (argc > 1)
		say("waiting\n");
	do {
		pthread_t threads[KINDS];
		int count = argc > 2 ? 0 : KINDS;
		for (int i = 0; i < count; i++)
			CHECK_IS(pthread_create(&threads[i], NULL, kinds[i], NULL), 0);
		polls(NULL);
		for (int i = 0; i < count; i++)
			CHECK_IS(pthread_join(threads[i], NULL), 0);
	} while (argc == 1 && going());
	return pass();
}
