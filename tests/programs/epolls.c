/* Proves: all modes of epoll: level, edge, one-shot, exclusive, nested, changed and removed;
 * eventfd, timerfd, signalfd and FIFOs in it; its signal masks and timeouts, to the nanosecond
 * where the kernel has them. */
#include "program.h"
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>

static volatile sig_atomic_t seen;
static void on(int signal) { (void)signal, seen++; }

static int set;

static void add(int fd, uint32_t events, uint64_t data)
{
	struct epoll_event e = { events, { .u64 = data } };
	CHECK_IS(epoll_ctl(set, EPOLL_CTL_ADD, fd, &e), 0);
}

/* What is ready now: the sum of all data fields. */
static uint64_t ready(int limit)
{
	struct epoll_event got[16];
	int n = epoll_wait(set, got, 16, limit);
	CHECK(n >= 0);
	uint64_t sum = 0;
	for (int i = 0; i < n; i++)
		sum += got[i].data.u64;
	return sum;
}

static void put(int fd) { CHECK_IS(write(fd, "r", 1), 1); }
static void take(int fd)
{
	char byte;
	CHECK_IS(read(fd, &byte, 1), 1);
}

static void triggers(void)
{
	int ends[2];
	CHECK_IS(pipe(ends), 0);
	set = epoll_create1(EPOLL_CLOEXEC);
	CHECK(set >= 0);
	add(ends[0], EPOLLIN, 1);
	CHECK_IS(ready(0), 0);
	put(ends[1]);
	CHECK_IS(ready(-1), 1);
	CHECK_IS(ready(0), 1); /* level: as long as there is data */
	take(ends[0]);
	CHECK_IS(ready(0), 0);
	struct epoll_event e = { EPOLLIN | EPOLLET, { .u64 = 2 } };
	put(ends[1]);
	CHECK_IS(epoll_ctl(set, EPOLL_CTL_MOD, ends[0], &e), 0);
	CHECK_IS(ready(-1), 2);
	CHECK_IS(ready(0), 0); /* edge: once for each arrival */
	put(ends[1]);
	CHECK_IS(ready(-1), 2);
	CHECK_IS(ready(0), 0);
	take(ends[0]);
	CHECK_IS(ready(0), 0);
	take(ends[0]);
	e.events = EPOLLIN | EPOLLONESHOT, e.data.u64 = 4;
	CHECK_IS(epoll_ctl(set, EPOLL_CTL_MOD, ends[0], &e), 0);
	put(ends[1]);
	CHECK_IS(ready(-1), 4);
	put(ends[1]);
	CHECK_IS(ready(0), 0); /* one shot: until it is armed again */
	CHECK_IS(epoll_ctl(set, EPOLL_CTL_MOD, ends[0], &e), 0);
	CHECK_IS(ready(-1), 4);
	take(ends[0]), take(ends[0]);
	CHECK_IS(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &e), -1);
	CHECK_IS(errno, EEXIST);
	CHECK_IS(epoll_ctl(set, EPOLL_CTL_DEL, ends[0], NULL), 0);
	put(ends[1]);
	CHECK_IS(ready(0), 0);
	CHECK_IS(epoll_ctl(set, EPOLL_CTL_DEL, ends[0], NULL), -1);
	CHECK_IS(errno, ENOENT);
	CHECK_IS(epoll_ctl(set, EPOLL_CTL_ADD, set, &e), -1);
	CHECK_IS(errno, EINVAL);

	/* nested: the inner set is ready when it has an event */
	int inner = set;
	set = epoll_create1(0);
	add(inner, EPOLLIN, 8);
	CHECK_IS(ready(0), 0);
	e.events = EPOLLIN, e.data.u64 = 16;
	CHECK_IS(epoll_ctl(inner, EPOLL_CTL_ADD, ends[0], &e), 0);
	CHECK_IS(ready(-1), 8);
	struct pollfd p = { inner, POLLIN, 0 };
	CHECK_IS(poll(&p, 1, 0), 1);
	/* one descriptor under two numbers, and one number closed while the duplicate lives */
	int copy = dup(ends[0]);
	add(copy, EPOLLIN, 32);
	CHECK_IS(ready(-1), 40);
	take(ends[0]);
	CHECK_IS(ready(0), 0);
	CHECK_IS(close(copy), 0);
	put(ends[1]);
	CHECK_IS(ready(-1), 40); /* the file is still open */
	close(inner), close(set);
	/* hang-up and errors are reported without being requested */
	set = epoll_create1(0);
	add(ends[0], 0, 1);
	take(ends[0]);
	CHECK_IS(close(ends[1]), 0);
	struct epoll_event got[2];
	CHECK_IS(epoll_wait(set, got, 2, -1), 1);
	CHECK_IS(got[0].events, EPOLLHUP);
	close(ends[0]), close(set);
}

/* Two children wait for one exclusive descriptor: each event is consumed once. */
static void exclusive(void)
{
	int event = eventfd(0, EFD_SEMAPHORE), told[2];
	CHECK(event >= 0 && pipe(told) == 0);
	pid_t children[2];
	for (int i = 0; i < 2; i++) {
		children[i] = fork();
		CHECK(children[i] >= 0);
		if (children[i] == 0) {
			set = epoll_create1(0);
			add(event, EPOLLIN | EPOLLEXCLUSIVE, 7);
			put(told[1]);
			uint64_t one;
			CHECK_IS(ready(-1), 7);
			CHECK_IS(read(event, &one, 8), 8);
			CHECK_IS(one, 1);
			_exit(3);
		}
	}
	take(told[0]), take(told[0]);
	uint64_t one = 1;
	for (int i = 0; i < 2; i++)
		CHECK_IS(write(event, &one, 8), 8);
	await_exit(children[0], 3), await_exit(children[1], 3);
	struct pollfd p = { event, POLLIN, 0 };
	CHECK_IS(poll(&p, 1, 0), 0);
	close(event), close(told[0]), close(told[1]);
}

static void sources(void)
{
	sigset_t mask;
	sigemptyset(&mask), sigaddset(&mask, SIGUSR2);
	CHECK_IS(sigprocmask(SIG_BLOCK, &mask, NULL), 0);
	int signals = signalfd(-1, &mask, SFD_NONBLOCK | SFD_CLOEXEC), event = eventfd(0, EFD_NONBLOCK),
	    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
	CHECK(signals >= 0 && event >= 0 && timer >= 0);
	CHECK_IS(mkfifo("f", 0600), 0);
	int in = open("f", O_RDONLY | O_NONBLOCK), out = open("f", O_WRONLY);
	CHECK(in >= 0 && out >= 0);
	set = epoll_create1(0);
	add(signals, EPOLLIN, 1), add(event, EPOLLIN, 16), add(timer, EPOLLIN, 256), add(in, EPOLLIN, 4096);
	CHECK_IS(ready(0), 0);
	CHECK_IS(kill(getpid(), SIGUSR2), 0);
	CHECK_IS(ready(-1), 1);
	CHECK_IS(eventfd_write(event, 9), 0);
	CHECK_IS(ready(-1), 17);
	put(out);
	CHECK_IS(ready(-1), 4113);
	struct itimerspec soon = { { 0, 0 }, { 0, 1000 } };
	CHECK_IS(timerfd_settime(timer, 0, &soon, NULL), 0);
	while (ready(-1) != 4369)
		;
	uint64_t number;
	CHECK_IS(read(timer, &number, 8), 8);
	CHECK_IS(number, 1);
	CHECK_IS(read(timer, &number, 8), -1);
	CHECK_IS(errno, EAGAIN);
	struct signalfd_siginfo info[2];
	CHECK_IS(read(signals, info, sizeof info), sizeof info[0]);
	CHECK_IS(info[0].ssi_signo, SIGUSR2);
	CHECK_IS(info[0].ssi_pid, getpid());
	CHECK_IS(read(signals, info, sizeof info), -1);
	CHECK_IS(errno, EAGAIN);
	CHECK_IS(read(event, &number, 8), 8);
	CHECK_IS(number, 9);
	take(in);
	CHECK_IS(ready(0), 0);
	/* a child's signal wakes the epoll through the signalfd */
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		rest_ms(30);
		_exit(kill(getppid(), SIGUSR2) == 0 ? 0 : 1);
	}
	CHECK_IS(ready(-1), 1);
	CHECK_IS(read(signals, info, sizeof info), sizeof info[0]);
	CHECK_IS(info[0].ssi_pid, child);
	await_exit(child, 0);
	/* its signal set is changed to SIGUSR1 */
	sigemptyset(&mask), sigaddset(&mask, SIGUSR1);
	CHECK_IS(sigprocmask(SIG_BLOCK, &mask, NULL), 0);
	CHECK_IS(signalfd(signals, &mask, 0), signals);
	CHECK_IS(kill(getpid(), SIGUSR2), 0);
	CHECK_IS(ready(0), 0);
	CHECK_IS(kill(getpid(), SIGUSR1), 0);
	CHECK_IS(ready(-1), 1);
	CHECK_IS(read(signals, info, sizeof info), sizeof info[0]);
	CHECK_IS(info[0].ssi_signo, SIGUSR1);
	struct timespec none = { 0, 0 };
	sigset_t two;
	sigemptyset(&two), sigaddset(&two, SIGUSR2);
	CHECK_IS(sigtimedwait(&two, NULL, &none), SIGUSR2);
	sigaddset(&mask, SIGUSR2);
	CHECK_IS(sigprocmask(SIG_UNBLOCK, &mask, NULL), 0);
	close(signals), close(event), close(timer), close(in), close(out), close(set);
	CHECK_IS(unlink("f"), 0);
}

static void lasted(double begun, double wanted)
{
	double took = now() - begun;
	if (took < wanted - 0.002 || took > wanted + 6)
		fail("FAIL: a wait of %.3f s took %.3f s\n", wanted, took);
}

static void masks_and_limits(void)
{
	struct sigaction action = { .sa_handler = on, .sa_flags = SA_RESTART };
	CHECK_IS(sigaction(SIGUSR1, &action, NULL), 0);
	sigset_t blocked, none, now_blocked;
	sigemptyset(&none), sigemptyset(&blocked), sigaddset(&blocked, SIGUSR1);
	CHECK_IS(sigprocmask(SIG_BLOCK, &blocked, NULL), 0);
	set = epoll_create1(0);
	struct epoll_event got;
	seen = 0;
	CHECK_IS(kill(getpid(), SIGUSR1), 0);
	CHECK_IS(epoll_pwait(set, &got, 1, 20000, &none), -1);
	CHECK_IS(errno, EINTR); /* never restarted, even with SA_RESTART */
	CHECK_IS(seen, 1);
	CHECK_IS(sigprocmask(SIG_BLOCK, NULL, &now_blocked), 0);
	CHECK(sigismember(&now_blocked, SIGUSR1));
	/* a signal from a child during the wait */
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		rest_ms(40);
		_exit(kill(getppid(), SIGUSR1) == 0 ? 0 : 1);
	}
	CHECK_IS(epoll_pwait(set, &got, 1, -1, &none), -1);
	CHECK_IS(errno, EINTR);
	CHECK_IS(seen, 2);
	await_exit(child, 0);
	/* a blocked signal does not interrupt it */
	double begun = now();
	CHECK_IS(kill(getpid(), SIGUSR1), 0);
	CHECK_IS(epoll_pwait(set, &got, 1, 60, &blocked), 0);
	lasted(begun, 0.06);
	CHECK_IS(seen, 2);
	struct timespec limit = { 0, 45000001 }, endless = { 20, 0 };
	begun = now();
	CHECK_IS(syscall(SYS_epoll_pwait2, set, &got, 1, &limit, &blocked, 8), 0);
	lasted(begun, 0.045);
	CHECK_IS(syscall(SYS_epoll_pwait2, set, &got, 1, &endless, &none, 8), -1);
	CHECK_IS(errno, EINTR);
	CHECK_IS(seen, 3);
	CHECK_IS(syscall(SYS_epoll_pwait2, set, &got, 0, NULL, NULL, 8), -1);
	CHECK_IS(errno, EINVAL);
	CHECK_IS(syscall(SYS_epoll_wait, set, 1L, 1, 0), 0); /* that address is not writable */
	CHECK_IS(sigprocmask(SIG_UNBLOCK, &blocked, NULL), 0);
	close(set);
}

int main(void)
{
	enter_scratch();
	do {
		triggers();
		exclusive();
		sources();
		masks_and_limits();
	} while (going());
	leave_scratch();
	return pass();
}
