/* Proves: kernel notifications: inotify, timerfd (intervals, absolute, cancelled by a clock
 * change), SIGIO with chosen owner and signal, directory notifications, leases; and FIFOs that
 * wait for their other end. */
#include "program.h"
#include <poll.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

static volatile sig_atomic_t seen, code, number;
static void on(int signal, siginfo_t *info, void *context)
{
	(void)signal, (void)context;
	code = info->si_code;
	number = info->si_fd;
	seen++;
}

static void handle(int signal)
{
	struct sigaction action = { .sa_sigaction = on, .sa_flags = SA_SIGINFO | SA_RESTART };
	CHECK_IS(sigaction(signal, &action, NULL), 0);
}

static void await_seen(int wanted)
{
	for (int i = 0; seen < wanted && i < 4000; i++)
		rest_ms(2);
	CHECK_IS(seen, wanted);
}

static void make(const char *name)
{
	int fd = open(name, O_CREAT | O_WRONLY, 0600);
	CHECK(fd >= 0);
	close(fd);
}

/* Reads exactly one event. */
static void expect(int fd, int watch, uint32_t mask, const char *name)
{
	static char space[4096] __attribute__((aligned(8)));
	static ssize_t have, at;
	if (at == have) {
		have = read(fd, space, sizeof space);
		at = 0;
		CHECK(have > 0);
	}
	struct inotify_event *e = (void *)(space + at);
	CHECK_IS(e->wd, watch);
	CHECK_IS(e->mask, mask);
	CHECK(strcmp(e->len ? e->name : "", name) == 0);
	at += (ssize_t)(sizeof *e + e->len);
}

static void watches(void)
{
	int fd = inotify_init1(IN_CLOEXEC);
	CHECK(fd >= 0);
	int here = inotify_add_watch(fd, ".", IN_CREATE | IN_DELETE | IN_MOVE | IN_CLOSE_WRITE);
	CHECK_IS(here, 1);
	make("a");
	expect(fd, here, IN_CREATE, "a"), expect(fd, here, IN_CLOSE_WRITE, "a");
	int file = inotify_add_watch(fd, "a", IN_MODIFY | IN_ONESHOT);
	CHECK_IS(file, 2);
	CHECK_IS(truncate("a", 5), 0);
	expect(fd, file, IN_MODIFY, ""), expect(fd, file, IN_IGNORED, "");
	CHECK_IS(rename("a", "longer-name-than-before"), 0);
	expect(fd, here, IN_MOVED_FROM, "a"), expect(fd, here, IN_MOVED_TO, "longer-name-than-before");
	/* an event caused by a child during the wait */
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		rest_ms(40);
		_exit(unlink("longer-name-than-before") == 0 ? 0 : 1);
	}
	expect(fd, here, IN_DELETE, "longer-name-than-before");
	await_exit(child, 0);
	CHECK_IS(inotify_rm_watch(fd, here), 0);
	expect(fd, here, IN_IGNORED, "");
	CHECK_IS(inotify_rm_watch(fd, here), -1);
	CHECK_IS(errno, EINVAL);
	make("a");
	int waiting;
	CHECK_IS(ioctl(fd, FIONREAD, &waiting), 0);
	CHECK_IS(waiting, 0);
	CHECK_IS(unlink("a"), 0);
	close(fd);
}

static void timers(void)
{
	int fd = timerfd_create(CLOCK_MONOTONIC, 0);
	CHECK(fd >= 0);
	struct itimerspec each = { { 0, 10000000 }, { 0, 30000000 } }, left;
	double begun = now();
	uint64_t count, all = 0;
	CHECK_IS(timerfd_settime(fd, 0, &each, NULL), 0);
	while (all < 8) {
		CHECK_IS(read(fd, &count, 8), 8);
		all += count;
	}
	CHECK(now() - begun > 0.0999); /* 30 ms, and seven times 10 */
	CHECK_IS(timerfd_gettime(fd, &left), 0);
	CHECK_IS(left.it_interval.tv_nsec, 10000000);
	CHECK(left.it_value.tv_sec == 0 && left.it_value.tv_nsec <= 10000000);
	/* absolute */
	struct itimerspec at = { { 0, 0 }, { 0, 0 } };
	begun = now();
	CHECK_IS(clock_gettime(CLOCK_MONOTONIC, &at.it_value), 0);
	at.it_value.tv_sec++;
	CHECK_IS(timerfd_settime(fd, TFD_TIMER_ABSTIME, &at, &left), 0);
	CHECK_IS(left.it_interval.tv_nsec, 10000000);
	CHECK_IS(read(fd, &count, 8), 8);
	CHECK_IS(count, 1);
	CHECK(now() - begun > 0.999);
	close(fd);
	/* on the wall clock, cancelled when that is set */
	fd = timerfd_create(CLOCK_REALTIME, TFD_NONBLOCK);
	CHECK_IS(clock_gettime(CLOCK_REALTIME, &at.it_value), 0);
	at.it_value.tv_sec += 500;
	CHECK_IS(timerfd_settime(fd, TFD_TIMER_ABSTIME | TFD_TIMER_CANCEL_ON_SET, &at, NULL), 0);
	CHECK_IS(read(fd, &count, 8), -1);
	CHECK(errno == EAGAIN || errno == ECANCELED);
	CHECK_IS(timerfd_gettime(fd, &left), 0);
	CHECK(left.it_value.tv_sec <= 500 && left.it_value.tv_sec > 300);
	close(fd);
}

static void owners(void)
{
	int pair[2], rt = SIGRTMIN + 5;
	CHECK_IS(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
	handle(SIGIO), handle(rt);
	seen = 0;
	CHECK_IS(fcntl(pair[0], F_GETOWN), 0);
	CHECK_IS(fcntl(pair[0], F_SETOWN, getpid()), 0);
	CHECK_IS(fcntl(pair[0], F_GETOWN), getpid());
	CHECK_IS(fcntl(pair[0], F_SETFL, O_ASYNC | O_NONBLOCK), 0);
	CHECK_IS(write(pair[1], "x", 1), 1);
	await_seen(1);
	CHECK_IS(code, SI_KERNEL);
	/* with a chosen signal, siginfo has the descriptor and the event, and the signal queues */
	CHECK_IS(fcntl(pair[0], F_SETSIG, rt), 0);
	CHECK_IS(fcntl(pair[0], F_GETSIG), rt);
	struct f_owner_ex owner = { F_OWNER_TID, getpid() }, got;
	CHECK_IS(fcntl(pair[0], F_SETOWN_EX, &owner), 0);
	CHECK_IS(fcntl(pair[0], F_GETOWN_EX, &got), 0);
	CHECK(got.type == F_OWNER_TID && got.pid == getpid());
	sigset_t only;
	sigemptyset(&only), sigaddset(&only, rt);
	CHECK_IS(sigprocmask(SIG_BLOCK, &only, NULL), 0);
	seen = 0;
	for (int i = 0; i < 3; i++)
		CHECK_IS(write(pair[1], "y", 1), 1);
	CHECK_IS(sigprocmask(SIG_UNBLOCK, &only, NULL), 0);
	await_seen(3);
	CHECK_IS(code, POLL_IN);
	CHECK_IS(number, pair[0]);
	/* from a child, and to the whole group: only this process has a handler for it */
	seen = 0;
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		rest_ms(20);
		_exit(write(pair[1], "z", 1) == 1 ? 0 : 1);
	}
	await_exit(child, 0);
	await_seen(1);
	char bytes[8];
	CHECK_IS(read(pair[0], bytes, 8), 5);
	int off = 0;
	CHECK_IS(ioctl(pair[0], FIOASYNC, &off), 0);
	CHECK(!(fcntl(pair[0], F_GETFL) & O_ASYNC));
	close(pair[0]), close(pair[1]);
}

static void directories(void)
{
	int fd = open(".", O_RDONLY | O_DIRECTORY), rt = SIGRTMIN + 5;
	CHECK(fd >= 0);
	seen = 0;
	CHECK_IS(fcntl(fd, F_SETSIG, rt), 0);
	CHECK_IS(fcntl(fd, F_NOTIFY, DN_CREATE | DN_DELETE | DN_MULTISHOT), 0);
	make("d");
	await_seen(1);
	CHECK_IS(number, fd);
	CHECK_IS(unlink("d"), 0);
	await_seen(2);
	close(fd);
	make("e");
	CHECK_IS(unlink("e"), 0);
	CHECK_IS(seen, 2);
}

/* A child's open of a leased file is reported to the holder, and waits until the lease is
 * released. */
static void leases(void)
{
	make("l");
	int fd = open("l", O_RDONLY), rt = SIGRTMIN + 5;
	CHECK(fd >= 0);
	CHECK_IS(fcntl(fd, F_SETSIG, rt), 0);
	CHECK_IS(fcntl(fd, F_SETLEASE, F_RDLCK), 0);
	CHECK_IS(fcntl(fd, F_GETLEASE), F_RDLCK);
	seen = 0;
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		close(fd);
		CHECK_IS(open("l", O_WRONLY | O_NONBLOCK), -1);
		CHECK_IS(errno, EWOULDBLOCK);
		_exit(open("l", O_WRONLY) >= 0 ? 0 : 1);
	}
	await_seen(1);
	CHECK_IS(number, fd);
	rest_ms(20);
	CHECK_IS(waitpid(child, NULL, WNOHANG), 0);
	CHECK_IS(fcntl(fd, F_SETLEASE, F_UNLCK), 0);
	await_exit(child, 0);
	close(fd);
	CHECK_IS(unlink("l"), 0);
}

static void fifos(void)
{
	CHECK_IS(mkfifo("f", 0600), 0);
	CHECK_IS(open("f", O_WRONLY | O_NONBLOCK), -1);
	CHECK_IS(errno, ENXIO);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		rest_ms(40);
		int in = open("f", O_RDONLY);
		char got[16];
		CHECK_IS(read(in, got, 16), 5);
		CHECK_IS(read(in, got, 16), 0);
		_exit(memcmp(got, "hello", 5) == 0 ? 6 : 1);
	}
	int out = open("f", O_WRONLY); /* waits for the child */
	CHECK(out >= 0);
	CHECK_IS(write(out, "hello", 5), 5);
	close(out);
	await_exit(child, 6);
	/* the same, interrupted and restarted meanwhile */
	handle(SIGUSR1);
	seen = 0;
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		rest_ms(30);
		CHECK_IS(kill(getppid(), SIGUSR1), 0);
		rest_ms(30);
		int end = open("f", O_WRONLY);
		_exit(write(end, "x", 1) == 1 ? 0 : 1);
	}
	int in = open("f", O_RDONLY);
	char byte;
	CHECK(in >= 0);
	CHECK_IS(read(in, &byte, 1), 1);
	CHECK_IS(seen, 1);
	await_exit(child, 0);
	close(in);
	CHECK_IS(unlink("f"), 0);
}

int main(void)
{
	enter_scratch();
	do {
		watches();
		timers();
		owners();
		directories();
		leases();
		fifos();
	} while (going());
	leave_scratch();
	return pass();
}
