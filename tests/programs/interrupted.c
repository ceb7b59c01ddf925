/* Proves: each call that can wait, interrupted by a handler, restarts or fails with EINTR
 * exactly as at home, with and without SA_RESTART; and an ignored signal interrupts none. */
#include "program.h"
#include <arpa/inet.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <termios.h>

static volatile sig_atomic_t seen;
static void on(int signal) { (void)signal, seen++; }

static int ends[2], full[2], pair[2], listener, set, event, timer, terminal, backlog, locked, queue, sems, fifo;
static pid_t child;
static struct sockaddr_un name;

static struct timespec brief = { 0, 250000000 };
static int word;

struct msg {
	long type;
	char text[8];
};

static long good(long r) { return r == 0 ? 1 : r; }

/* Longer than a suspended process may wait for its node. */
#define LONG_MS 100000

/* Each makes its call, which waits until the child ends it, or for a quarter of a second if only
 * a timeout can end it. */
static long read_pipe(void) { char b; return read(ends[0], &b, 1); }
static long write_pipe(void) { static char block[5000]; return write(full[1], block, sizeof block); }
static long read_tty(void) { char b[8]; return read(terminal, b, 8); }
static long read_event(void) { uint64_t v; return read(event, &v, 8); }
static long read_timer(void) { uint64_t v; return read(timer, &v, 8); }
static long receive(void) { char b; return recv(pair[0], &b, 1, 0); }
static long accept_one(void)
{
	int fd = accept(listener, NULL, NULL);
	return fd >= 0 ? good(close(fd)) : fd;
}
static long connect_one(void)
{
	int fd = socket(AF_UNIX, SOCK_STREAM, 0), r = connect(fd, (void *)&name, sizeof name), kept = errno;
	close(fd);
	errno = kept;
	return good(r);
}
static long open_fifo(void)
{
	int fd = open("fifo", O_RDONLY);
	return fd >= 0 ? good(close(fd)) : fd;
}
static long wait_poll(void) { struct pollfd p = { ends[0], POLLIN, 0 }; return poll(&p, 1, LONG_MS); }
static long wait_ppoll(void)
{
	struct pollfd p = { ends[0], POLLIN, 0 };
	struct timespec t = { LONG_MS / 1000, 0 };
	return ppoll(&p, 1, &t, NULL);
}
static long wait_select(void)
{
	fd_set s;
	FD_ZERO(&s);
	FD_SET(ends[0], &s);
	struct timeval t = { LONG_MS / 1000, 0 };
	return select(ends[0] + 1, &s, NULL, NULL, &t);
}
static long wait_epoll(void) { struct epoll_event e; return epoll_wait(set, &e, 1, LONG_MS); }
static long take_message(void) { struct msg m; return msgrcv(queue, &m, 8, 1, 0); }
static long take_sem(void) { struct sembuf b = { 0, -1, 0 }; return good(semop(sems, &b, 1)); }
static long take_sem_timed(void)
{
	struct sembuf b = { 0, -1, 0 };
	struct timespec t = { LONG_MS / 1000, 0 };
	return good(semtimedop(sems, &b, 1, &t));
}
static long lock_flock(void) { int r = flock(locked, LOCK_EX); return r == 0 ? good(flock(locked, LOCK_UN)) : r; }
static long lock_record(void)
{
	struct flock l = { .l_type = F_WRLCK, .l_len = 1 };
	int r = fcntl(locked, F_SETLKW, &l);
	if (r == 0)
		l.l_type = F_UNLCK, r = good(fcntl(locked, F_SETLK, &l));
	return r;
}
static long lock_ofd(void)
{
	struct flock l = { .l_type = F_WRLCK, .l_len = 1 };
	int r = fcntl(locked, F_OFD_SETLKW, &l);
	if (r == 0)
		l.l_type = F_UNLCK, r = good(fcntl(locked, F_OFD_SETLK, &l));
	return r;
}
static long wait_child(void)
{
	int status, r = waitpid(child, &status, 0);
	if (r > 0)
		child = 0;
	return r > 0 ? 1 : r;
}
static long wait_child_id(void)
{
	siginfo_t i;
	return good(waitid(P_PID, (id_t)child, &i, WEXITED | WNOWAIT));
}
static long sleep_brief(void)
{
	struct timespec left = { 9, 9 };
	int r = nanosleep(&brief, &left);
	/* the remaining time may be a little more than requested: the kernel adds the timer
	 * slack */
	if (r < 0 && (left.tv_sec != 0 || left.tv_nsec > brief.tv_nsec + 1000000))
		return -9;
	return good(r);
}
static long sleep_until(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	t.tv_sec++;
	int r = clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
	errno = r;
	return r ? -1 : 1;
}
static long wait_signal(void)
{
	sigset_t s;
	siginfo_t i;
	sigemptyset(&s), sigaddset(&s, SIGUSR2);
	/* musl's wrapper repeats it by itself */
	return syscall(SYS_rt_sigtimedwait, &s, &i, &(struct timespec){ LONG_MS / 1000, 0 }, 8);
}
static long futex_limit(void)
{
	/* only the timeout ends it: ETIMEDOUT is its regular end */
	long r = syscall(SYS_futex, &word, 128 /* FUTEX_WAIT_PRIVATE */, 0, &brief, NULL, 0);
	return r < 0 && errno == ETIMEDOUT ? 1 : r;
}
static long futex_until(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	t.tv_nsec += brief.tv_nsec;
	if (t.tv_nsec >= 1000000000)
		t.tv_nsec -= 1000000000, t.tv_sec++;
	long r = syscall(SYS_futex, &word, 137 /* FUTEX_WAIT_BITSET_PRIVATE */, 0, &t, NULL, -1);
	return r < 0 && errno == ETIMEDOUT ? 1 : r;
}
static long receive_limit(void)
{
	struct timeval t = { 0, 250000 };
	CHECK_IS(setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t), 0);
	char b;
	long r = recv(pair[0], &b, 1, 0);
	int kept = errno;
	t.tv_usec = 0;
	CHECK_IS(setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t), 0);
	errno = kept;
	return r < 0 && errno == EAGAIN ? 1 : r;
}

/* How the wait ends: the child does this, or it ends by itself. */
enum end { BY_ITSELF, BYTE, DRAIN, TYPED, EVENT, DATA, CONNECTED, ACCEPTED, OPENED, MESSAGE, SEM, UNLOCK, EXIT, SIGNAL };

static const struct {
	const char *what;
	long (*call)(void);
	enum end end;
	bool restarts; /* with SA_RESTART */
	bool always;   /* and without it, too */
} calls[] = {
	{ "read of a pipe", read_pipe, BYTE, true, false },
	{ "write to a full pipe", write_pipe, DRAIN, true, false },
	{ "read of a terminal", read_tty, TYPED, true, false },
	{ "read of an eventfd", read_event, EVENT, true, false },
	{ "read of a timerfd", read_timer, BY_ITSELF, true, false },
	{ "recv", receive, DATA, true, false },
	{ "recv with SO_RCVTIMEO", receive_limit, BY_ITSELF, false, false },
	{ "accept", accept_one, CONNECTED, true, false },
	{ "connect to a full backlog", connect_one, ACCEPTED, true, false },
	{ "open of a FIFO", open_fifo, OPENED, true, false },
	{ "poll", wait_poll, BYTE, false, false },
	{ "ppoll", wait_ppoll, BYTE, false, false },
	{ "select", wait_select, BYTE, false, false },
	{ "epoll_wait", wait_epoll, BYTE, false, false },
	{ "msgrcv", take_message, MESSAGE, false, false },
	{ "semop", take_sem, SEM, false, false },
	{ "semtimedop", take_sem_timed, SEM, false, false },
	{ "flock", lock_flock, UNLOCK, true, false },
	{ "F_SETLKW", lock_record, UNLOCK, true, false },
	{ "F_OFD_SETLKW", lock_ofd, UNLOCK, true, false },
	{ "waitpid", wait_child, EXIT, true, false },
	{ "waitid", wait_child_id, EXIT, true, false },
	{ "nanosleep", sleep_brief, BY_ITSELF, false, false },
	{ "clock_nanosleep until", sleep_until, BY_ITSELF, false, false },
	{ "sigtimedwait", wait_signal, SIGNAL, false, false },
	{ "futex with a limit", futex_limit, BY_ITSELF, false, false },
	{ "futex until", futex_until, BY_ITSELF, false, false },
};

/* In the child: ends the parent's wait. */
static void finish(enum end end, pid_t parent)
{
	char block[8192];
	struct msg m = { 1, "text" };
	struct sembuf b = { 0, 1, 0 };
	int fd;
	switch (end) {
	case BY_ITSELF:
		break;
	case BYTE:
		CHECK_IS(write(ends[1], "b", 1), 1);
		break;
	case DRAIN:
		CHECK(read(full[0], block, sizeof block) > 0);
		break;
	case TYPED:
		CHECK_IS(write(backlog, "t\n", 2), 2); /* the master's side */
		break;
	case EVENT:
		CHECK_IS(eventfd_write(event, 1), 0);
		break;
	case DATA:
		CHECK_IS(send(pair[1], "d", 1, 0), 1);
		break;
	case CONNECTED:
		fd = socket(AF_UNIX, SOCK_STREAM, 0);
		CHECK_IS(connect(fd, (void *)&name, sizeof name), 0);
		break;
	case ACCEPTED:
		CHECK(accept(listener, NULL, NULL) >= 0);
		break;
	case OPENED:
		/* Blocks, too, if the reader was just interrupted. */
		CHECK(open("fifo", O_WRONLY) >= 0);
		break;
	case MESSAGE:
		CHECK_IS(msgsnd(queue, &m, 8, 0), 0);
		break;
	case SEM:
		CHECK_IS(semop(sems, &b, 1), 0);
		break;
	case UNLOCK:
	case EXIT:
		break; /* ended by its child */
	case SIGNAL:
		CHECK_IS(kill(parent, SIGUSR2), 0);
		break;
	}
}

static void prepare(enum end end)
{
	char b;
	if (end == DRAIN) {
		CHECK_IS(fcntl(full[1], F_SETFL, O_NONBLOCK), 0);
		while (write(full[1], "0123456789abcdef", 16) == 16)
			;
		CHECK_IS(fcntl(full[1], F_SETFL, 0), 0);
	}
	if (end == ACCEPTED) {
		int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
		while (connect(fd, (void *)&name, sizeof name) == 0)
			fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
		CHECK_IS(errno, EAGAIN);
		close(fd);
	}
	if (end == BY_ITSELF) {
		struct itimerspec t = { { 0, 0 }, brief };
		CHECK_IS(timerfd_settime(timer, 0, &t, NULL), 0);
	}
	CHECK_IS(fcntl(ends[0], F_SETFL, O_NONBLOCK), 0);
	while (read(ends[0], &b, 1) == 1)
		;
	CHECK_IS(fcntl(ends[0], F_SETFL, 0), 0);
}

static void take_turns(int which, int flags)
{
	enum end end = calls[which].end;
	bool ignored = flags == -1, goes_on = ignored || (flags ? calls[which].restarts : calls[which].always);
	struct sigaction action = { .sa_handler = ignored ? SIG_IGN : on, .sa_flags = ignored ? 0 : flags };
	CHECK_IS(sigaction(SIGUSR1, &action, NULL), 0);
	prepare(end);
	int told[2], ready[2];
	CHECK(pipe(told) == 0 && pipe(ready) == 0);
	seen = 0;
	pid_t parent = getpid();
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		char byte;
		alarm(100);
		close(told[1]);
		int own = open("lock", O_RDWR);
		struct flock l = { .l_type = F_WRLCK, .l_len = 1 };
		if (end == UNLOCK)
			CHECK(flock(own, LOCK_EX) == 0 && fcntl(own, F_SETLK, &l) == 0);
		CHECK_IS(write(ready[1], "r", 1), 1);
		CHECK_IS(fcntl(told[0], F_SETFL, O_NONBLOCK), 0);
		/* Signals until the parent reports the interruption; twice for calls that
		 * restart. */
		for (int i = 0; i < 2 || !goes_on; i++) {
			rest_ms(25);
			CHECK_IS(kill(parent, SIGUSR1), 0);
			rest_ms(5);
			if (!goes_on && read(told[0], &byte, 1) >= 0)
				break;
		}
		rest_ms(15);
		finish(end, parent);
		_exit(0);
	}
	char byte;
	close(told[0]);
	int got;
	/* The child's first signal may come while the parent is stopped in this call, to be moved. It
	 * then interrupts the call, as after SIGSTOP, although the byte is there. */
	while ((got = read(ready[0], &byte, 1)) == -1 && errno == EINTR && !(flags & SA_RESTART) && seen)
		;
	CHECK_IS(got, 1);
	long r;
	bool was_interrupted = false;
	pid_t born = child;
	for (;;) {
		int before = seen;
		r = calls[which].call();
		if (r != -1 || errno != EINTR)
			break;
		if (goes_on)
			fail("FAIL: %s was interrupted (flags %d)\n", calls[which].what, flags);
		if (seen == before)
			fail("FAIL: %s was interrupted by nothing\n", calls[which].what);
		if (!was_interrupted)
			CHECK_IS(write(told[1], "i", 1), 1);
		was_interrupted = true;
	}
	int how = errno;
	action.sa_flags = ignored ? 0 : SA_RESTART; /* another signal may still come */
	CHECK_IS(sigaction(SIGUSR1, &action, NULL), 0);
	if (r <= 0)
		fail("FAIL: %s ended with %ld, errno %d (flags %d)\n", calls[which].what, r, how, flags);
	if (!goes_on && !was_interrupted && end != BY_ITSELF)
		fail("FAIL: %s was not interrupted (flags %d)\n", calls[which].what, flags);
	if (!ignored && !seen && end != BY_ITSELF)
		fail("FAIL: no handler ran during %s\n", calls[which].what);
	close(told[1]), close(ready[0]), close(ready[1]);
	if (child)
		await_exit(born, 0);
}

static void drained(void)
{
	int fd;
	CHECK_IS(fcntl(listener, F_SETFL, O_NONBLOCK), 0);
	while ((fd = accept(listener, NULL, NULL)) >= 0)
		close(fd);
	CHECK_IS(fcntl(listener, F_SETFL, 0), 0);
	for (fd = fifo + 1; fd < fifo + 40; fd++) /* descriptors of the backlog */
		close(fd);
}

int main(void)
{
	enter_scratch();
	sigset_t two;
	sigemptyset(&two), sigaddset(&two, SIGUSR2);
	CHECK_IS(sigprocmask(SIG_BLOCK, &two, NULL), 0);
	CHECK(pipe(ends) == 0 && pipe(full) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	listener = socket(AF_UNIX, SOCK_STREAM, 0);
	name.sun_family = AF_UNIX;
	strcpy(name.sun_path, "socket");
	CHECK(bind(listener, (void *)&name, sizeof name) == 0 && listen(listener, 1) == 0);
	set = epoll_create1(0), event = eventfd(0, 0), timer = timerfd_create(CLOCK_MONOTONIC, 0);
	struct epoll_event e = { EPOLLIN, { .u64 = 1 } };
	CHECK_IS(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &e), 0);
	backlog = posix_openpt(O_RDWR | O_NOCTTY);
	char slave[32];
	CHECK(grantpt(backlog) == 0 && unlockpt(backlog) == 0 && ptsname_r(backlog, slave, sizeof slave) == 0);
	terminal = open(slave, O_RDWR | O_NOCTTY);
	CHECK(terminal >= 0 && mkfifo("fifo", 0600) == 0);
	locked = open("lock", O_RDWR | O_CREAT, 0600);
	queue = msgget(IPC_PRIVATE, 0600), sems = semget(IPC_PRIVATE, 1, 0600);
	CHECK(locked >= 0 && queue >= 0 && sems >= 0);
	fifo = dup(0);
	CHECK(fifo > 0);
	int round = 0;
	do {
		for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
			int flags[] = { 0, SA_RESTART, -1 };
			take_turns((int)i, flags[(i + (size_t)round) % 3]);
			if (calls[i].end == ACCEPTED)
				drained();
		}
		round++;
	} while (going() || round < 3);
	CHECK_IS(msgctl(queue, IPC_RMID, NULL) | semctl(sems, 0, IPC_RMID), 0);
	CHECK_IS(unlink("socket") | unlink("fifo") | unlink("lock"), 0);
	leave_scratch();
	return pass();
}
