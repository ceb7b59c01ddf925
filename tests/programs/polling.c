/* Proves: poll, ppoll, select, pselect and epoll: timeouts that last, readiness caused by a
 * child meanwhile, and the masks of ppoll and pselect. */
#include "program.h"
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/select.h>
#include <sys/timerfd.h>

static volatile sig_atomic_t seen;
static void on(int signal)
{
	(void)signal;
	seen++;
}

static pid_t write_soon(int fd)
{
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		rest_ms(70);
		_exit(write(fd, "r", 1) == 1 ? 0 : 1);
	}
	return child;
}

static void take(int fd, pid_t child)
{
	char byte = 0;
	CHECK_IS(read(fd, &byte, 1), 1);
	CHECK_IS(byte, 'r');
	await_exit(child, 0);
}

static void lasted(double begun, double wanted)
{
	double took = now() - begun;
	if (took < wanted - 0.002 || took > wanted + 6)
		fail("FAIL: a wait of %.3f s took %.3f s\n", wanted, took);
}

int main(void)
{
	int ends[2];
	CHECK_IS(pipe(ends), 0);
	struct sigaction action = { .sa_handler = on };
	CHECK_IS(sigaction(SIGUSR1, &action, NULL), 0);
	do {
		struct pollfd one = { ends[0], POLLIN, 0 };
		double begun = now();
		CHECK_IS(poll(&one, 1, 120), 0);
		lasted(begun, 0.12);
		pid_t child = write_soon(ends[1]);
		CHECK_IS(poll(&one, 1, -1), 1);
		CHECK_IS(one.revents, POLLIN);
		take(ends[0], child);
		struct pollfd closed = { 999, POLLIN, 0 };
		CHECK_IS(poll(&closed, 1, 0), 1);
		CHECK_IS(closed.revents, POLLNVAL);

		/* ppoll's mask lets the signal in, atomically */
		sigset_t blocked, none;
		sigemptyset(&none), sigemptyset(&blocked), sigaddset(&blocked, SIGUSR1);
		CHECK_IS(sigprocmask(SIG_BLOCK, &blocked, NULL), 0);
		seen = 0;
		raise(SIGUSR1);
		struct timespec lasting = { 20, 0 }, brief = { 0, 60000000 };
		CHECK_IS(ppoll(&one, 1, &lasting, &none), -1);
		CHECK_IS(errno, EINTR);
		CHECK_IS(seen, 1);
		begun = now();
		CHECK_IS(ppoll(&one, 1, &brief, NULL), 0);
		lasted(begun, 0.06);

		fd_set set;
		FD_ZERO(&set);
		FD_SET(ends[0], &set);
		struct timeval limit = { 0, 110000 };
		begun = now();
		CHECK_IS(select(ends[0] + 1, &set, NULL, NULL, &limit), 0);
		lasted(begun, 0.11);
		CHECK(!FD_ISSET(ends[0], &set));
		FD_SET(ends[0], &set);
		child = write_soon(ends[1]);
		CHECK_IS(select(ends[0] + 1, &set, NULL, NULL, NULL), 1);
		CHECK(FD_ISSET(ends[0], &set));
		take(ends[0], child);
		raise(SIGUSR1);
		FD_SET(ends[0], &set);
		CHECK_IS(pselect(ends[0] + 1, &set, NULL, NULL, &lasting, &none), -1);
		CHECK_IS(errno, EINTR);
		CHECK_IS(seen, 2);

		int epoll = epoll_create1(EPOLL_CLOEXEC), event = eventfd(0, EFD_CLOEXEC);
		int timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
		CHECK(epoll >= 0 && event >= 0 && timer >= 0);
		struct epoll_event on_pipe = { EPOLLIN, { .u64 = 0x123456789abcdef0u } },
				   on_event = { EPOLLIN, { .u64 = 2 } }, on_timer = { EPOLLIN, { .u64 = 3 } }, got[4];
		CHECK_IS(epoll_ctl(epoll, EPOLL_CTL_ADD, ends[0], &on_pipe), 0);
		CHECK_IS(epoll_ctl(epoll, EPOLL_CTL_ADD, event, &on_event), 0);
		CHECK_IS(epoll_ctl(epoll, EPOLL_CTL_ADD, timer, &on_timer), 0);
		begun = now();
		CHECK_IS(epoll_wait(epoll, got, 4, 90), 0);
		lasted(begun, 0.09);
		child = write_soon(ends[1]);
		CHECK_IS(epoll_wait(epoll, got, 4, -1), 1);
		CHECK(got[0].data.u64 == 0x123456789abcdef0u && got[0].events == EPOLLIN);
		take(ends[0], child);
		struct itimerspec when = { { 0, 0 }, { 0, 50000000 } };
		begun = now();
		CHECK_IS(timerfd_settime(timer, 0, &when, NULL), 0);
		CHECK_IS(epoll_pwait(epoll, got, 4, -1, &blocked), 1);
		lasted(begun, 0.05);
		CHECK_IS(got[0].data.u64, 3);
		uint64_t number = 5;
		CHECK_IS(read(timer, &number, 8), 8);
		CHECK_IS(number, 1);
		number = 41;
		CHECK_IS(write(event, &number, 8), 8);
		CHECK_IS(epoll_wait(epoll, got, 4, -1), 1);
		CHECK_IS(got[0].data.u64, 2);
		CHECK_IS(read(event, &number, 8), 8);
		CHECK_IS(number, 41);
		close(epoll), close(event), close(timer);
		CHECK_IS(sigprocmask(SIG_UNBLOCK, &blocked, NULL), 0);
	} while (going());
	return pass();
}
