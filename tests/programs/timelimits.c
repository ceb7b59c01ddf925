/* Proves: a call that waits for a limited time ends after that time, however often its process moves
 * meanwhile. */
#include "program.h"
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

/* Whoever moves the process when it says so, in the last third of its waits, makes a wait that begins anew
 * take too long. The move itself takes some time. */
enum { LIMIT_MS = 1000, SAYS_MS = 700, SLACK_MS = 500 };

static int ends[2], set, semaphore, receiving[2], sending[2], idle, connecting;
static struct sockaddr_un busy_address;
static socklen_t busy_length = sizeof busy_address;
static volatile bool over;

/* As in linux/futex.h, which musl does not have. */
enum { WAIT = 0, WAIT_BITSET = 9, WAIT_REQUEUE_PI = 11, PRIVATE = 128, WAITV = 449, OF_32_BITS = 2 };

typedef int wait_fn(struct timespec *limit);

static int by_poll(struct timespec *limit UNUSED)
{
	struct pollfd f = { ends[0], POLLIN, 0 };
	return (int)syscall(SYS_poll, &f, 1, LIMIT_MS);
}

static int by_ppoll(struct timespec *limit)
{
	struct pollfd f = { ends[0], POLLIN, 0 };
	return (int)syscall(SYS_ppoll, &f, 1, limit, NULL, 8);
}

static int by_select(struct timespec *limit)
{
	fd_set fds;
	FD_ZERO(&fds);
	FD_SET(ends[0], &fds);
	struct timeval tv = { limit->tv_sec, limit->tv_nsec / 1000 };
	return (int)syscall(SYS_select, ends[0] + 1, &fds, NULL, NULL, &tv);
}

static int by_pselect(struct timespec *limit)
{
	return (int)syscall(SYS_pselect6, 0, NULL, NULL, NULL, limit, NULL);
}

static int by_epoll_wait(struct timespec *limit UNUSED)
{
	struct epoll_event event;
	return (int)syscall(SYS_epoll_wait, set, &event, 1, LIMIT_MS);
}

static int by_epoll_pwait(struct timespec *limit UNUSED)
{
	struct epoll_event event;
	return (int)syscall(SYS_epoll_pwait, set, &event, 1, LIMIT_MS, NULL, 8);
}

static int by_epoll_pwait2(struct timespec *limit)
{
	struct epoll_event event;
	return (int)syscall(SYS_epoll_pwait2, set, &event, 1, limit, NULL, 8);
}

static int by_sigtimedwait(struct timespec *limit)
{
	uint64_t usr1 = 1u << (SIGUSR1 - 1);
	return (int)syscall(SYS_rt_sigtimedwait, &usr1, NULL, limit, 8) < 0 && errno == EAGAIN ? 0 : -1;
}

static int by_semtimedop(struct timespec *limit)
{
	struct sembuf take = { 0, -1, 0 };
	return (int)syscall(SYS_semtimedop, semaphore, &take, 1, limit) < 0 && errno == EAGAIN ? 0 : -1;
}

static int by_recv(struct timespec *limit UNUSED)
{
	char byte;
	return recv(receiving[0], &byte, 1, 0) < 0 && errno == EAGAIN ? 0 : -1;
}

static int by_read(struct timespec *limit UNUSED)
{
	char byte;
	return read(receiving[1], &byte, 1) < 0 && errno == EAGAIN ? 0 : -1;
}

static int by_accept(struct timespec *limit UNUSED)
{
	return accept(idle, NULL, NULL) < 0 && errno == EAGAIN ? 0 : -1;
}

static int by_send(struct timespec *limit UNUSED)
{
	char block[4096] = { 0 };
	while (send(sending[0], block, sizeof block, MSG_DONTWAIT) > 0)
		;
	return send(sending[0], block, sizeof block, 0) < 0 && errno == EAGAIN ? 0 : -1;
}

/* Nobody accepts, and the queue of the listening socket is full. */
static int by_connect(struct timespec *limit UNUSED)
{
	return connect(connecting, (struct sockaddr *)&busy_address, busy_length) < 0 && errno == EAGAIN ? 0 : -1;
}

static int by_nanosleep(struct timespec *limit)
{
	return (int)syscall(SYS_nanosleep, limit, NULL);
}

static int timed_out(long result)
{
	return result < 0 && errno == ETIMEDOUT ? 0 : -1;
}

/* Nobody changes the word of a futex or wakes those who wait. */
static int by_futex(struct timespec *limit)
{
	static unsigned word;
	return timed_out(syscall(SYS_futex, &word, WAIT, 0, limit, NULL, 0));
}

static int by_private_futex(struct timespec *limit)
{
	static unsigned word;
	return timed_out(syscall(SYS_futex, &word, WAIT | PRIVATE, 0, limit, NULL, 0));
}

/* Makes a time limit the time at which the wait must end. */
static void make_absolute(struct timespec *limit, clockid_t clock)
{
	struct timespec begun;
	CHECK_IS(clock_gettime(clock, &begun), 0);
	limit->tv_sec += begun.tv_sec + (limit->tv_nsec + begun.tv_nsec) / 1000000000;
	limit->tv_nsec = (limit->tv_nsec + begun.tv_nsec) % 1000000000;
}

static int by_futex_bitset(struct timespec *limit)
{
	static unsigned word;
	make_absolute(limit, CLOCK_MONOTONIC);
	return timed_out(syscall(SYS_futex, &word, WAIT_BITSET | PRIVATE, 0, limit, NULL, -1));
}

static int by_futex_requeue(struct timespec *limit)
{
	static unsigned word, target;
	make_absolute(limit, CLOCK_MONOTONIC);
	return timed_out(syscall(SYS_futex, &word, WAIT_REQUEUE_PI | PRIVATE, 0, limit, &target, 0));
}

static int by_futex_waitv(struct timespec *limit)
{
	static unsigned word;
	struct {
		uint64_t value, word;
		uint32_t flags, reserved;
	} waiter = { 0, (uintptr_t)&word, OF_32_BITS | PRIVATE, 0 };
	make_absolute(limit, CLOCK_MONOTONIC);
	return timed_out(syscall(WAITV, &waiter, 1, 0, limit, CLOCK_MONOTONIC));
}

static const struct {
	const char *name;
	wait_fn *wait;
} kinds[] = {
	{ "poll", by_poll },		 { "ppoll", by_ppoll },
	{ "select", by_select },	 { "pselect", by_pselect },
	{ "epoll_wait", by_epoll_wait }, { "epoll_pwait", by_epoll_pwait },
	{ "epoll_pwait2", by_epoll_pwait2 }, { "sigtimedwait", by_sigtimedwait },
	{ "semtimedop", by_semtimedop }, { "nanosleep", by_nanosleep },
	{ "recv", by_recv },		 { "read", by_read },
	{ "accept", by_accept },	 { "send", by_send },
	{ "connect", by_connect },	 { "futex", by_futex },
	{ "private futex", by_private_futex }, { "futex until", by_futex_bitset },
	{ "futex requeue", by_futex_requeue }, { "futex_waitv", by_futex_waitv },
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static void *repeat(void *number)
{
	size_t kind = (size_t)number;
	while (!over) {
		struct timespec limit = { LIMIT_MS / 1000, LIMIT_MS % 1000 * 1000000 };
		double begun = now();
		int result = kinds[kind].wait(&limit);
		long took = (long)((now() - begun) * 1000);
		if (result != 0 || took < LIMIT_MS - 2 || took > LIMIT_MS + SLACK_MS)
			fail("FAIL %s: result %d (errno %d) after %ld ms of %d\n", kinds[kind].name, result, errno,
			     took, LIMIT_MS);
	}
	return NULL;
}

/* Sets the time limit of calls on a socket. */
static int limited(int fd, int option)
{
	struct timeval limit = { LIMIT_MS / 1000, LIMIT_MS % 1000 * 1000 };
	CHECK_IS(setsockopt(fd, SOL_SOCKET, option, &limit, sizeof limit), 0);
	return fd;
}

/* A listening socket at an address of the kernel's choice. */
static int listener(void)
{
	struct sockaddr_un any = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);
	CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&any, sizeof any.sun_family) == 0 && listen(fd, 0) == 0);
	return fd;
}

static void make_sockets(void)
{
	CHECK_IS(socketpair(AF_UNIX, SOCK_STREAM, 0, receiving), 0);
	CHECK_IS(socketpair(AF_UNIX, SOCK_STREAM, 0, sending), 0);
	limited(receiving[0], SO_RCVTIMEO);
	limited(receiving[1], SO_RCVTIMEO);
	limited(sending[0], SO_SNDTIMEO);
	idle = limited(listener(), SO_RCVTIMEO);
	CHECK_IS(getsockname(listener(), (struct sockaddr *)&busy_address, &busy_length), 0);
	int first = socket(AF_UNIX, SOCK_STREAM, 0);
	CHECK_IS(connect(first, (struct sockaddr *)&busy_address, busy_length), 0);
	connecting = limited(socket(AF_UNIX, SOCK_STREAM, 0), SO_SNDTIMEO);
}

int main(void)
{
	pthread_t threads[KINDS];
	sigset_t usr1;
	sigemptyset(&usr1);
	sigaddset(&usr1, SIGUSR1);
	CHECK_IS(sigprocmask(SIG_BLOCK, &usr1, NULL), 0);
	CHECK_IS(pipe(ends), 0);
	set = epoll_create1(0);
	struct epoll_event event = { .events = EPOLLIN };
	CHECK_IS(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event), 0);
	make_sockets();
	semaphore = semget(IPC_PRIVATE, 1, 0600);
	CHECK(semaphore >= 0);
	for (size_t i = 0; i < KINDS; i++)
		CHECK_IS(pthread_create(&threads[i], NULL, repeat, (void *)i), 0);
	rest_ms(SAYS_MS);
	say("waiting\n");
	while (going())
		rest_ms(20);
	over = true;
	for (size_t i = 0; i < KINDS; i++)
		CHECK_IS(pthread_join(threads[i], NULL), 0);
	CHECK_IS(semctl(semaphore, 0, IPC_RMID), 0);
	return pass();
}
