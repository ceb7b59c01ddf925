/* Proves: reads and writes in small pieces, through descriptors that no other process has, are
 * coherent with those of other processes as soon as one process can learn of another's: by a pipe,
 * a signal, a lock, a wait; and offsets are private or shared as after fork, dup and exec. */
#include "program.h"
#include <sys/resource.h>

enum { SIZE = 64 << 10, PIECE = 700 };
static unsigned char buffer[SIZE];

static void fill(unsigned char with)
{
	for (size_t i = 0; i < SIZE; i++)
		buffer[i] = (unsigned char)(with + i / PIECE);
}

/* Rewrites the file in small pieces, through a descriptor of its own. */
static void write_all(const char *name, unsigned char with, int flags)
{
	int fd = open(name, O_WRONLY | O_CREAT | flags, 0600);
	CHECK(fd >= 0);
	fill(with);
	for (size_t at = 0; at < SIZE;) {
		size_t n = SIZE - at < PIECE ? SIZE - at : PIECE;
		CHECK_IS(write(fd, buffer + at, n), n);
		at += n;
	}
	CHECK_IS(lseek(fd, 0, SEEK_CUR), SIZE);
	CHECK_IS(close(fd), 0);
}

static void expect(int fd, size_t from, size_t to, unsigned char with)
{
	unsigned char got[PIECE];
	for (size_t at = from; at < to;) {
		size_t n = to - at < PIECE ? to - at : PIECE;
		CHECK_IS(read(fd, got, n), n);
		for (size_t i = 0; i < n; i++)
			CHECK_IS(got[i], (unsigned char)(with + (at + i) / PIECE));
		at += n;
	}
}

struct pair {
	int ask[2], answer[2];
};

static void tell(int fd)
{
	CHECK_IS(write(fd, "x", 1), 1);
}

static void hear(int fd)
{
	char c;
	CHECK_IS(read(fd, &c, 1), 1);
}

/* A child that rewrites the file on request, and reports that; and reads what its parent has
 * written. */
static pid_t other(struct pair *p, int rounds)
{
	CHECK_IS(pipe(p->ask), 0);
	CHECK_IS(pipe(p->answer), 0);
	pid_t child = fork();
	CHECK(child >= 0);
	/* If one of the two fails, the other notices. */
	CHECK(close(child ? p->ask[0] : p->ask[1]) == 0 && close(child ? p->answer[1] : p->answer[0]) == 0);
	if (child)
		return child;
	for (int round = 0; round < rounds; round++) {
		hear(p->ask[0]);
		write_all("theirs", (unsigned char)(round + 1), 0);
		int fd = open("mine", O_RDONLY);
		CHECK(fd >= 0);
		expect(fd, 0, (size_t)(round + 1) * PIECE, 9);
		CHECK_IS(read(fd, buffer, 1), 0);
		CHECK_IS(close(fd), 0);
		tell(p->answer[1]);
	}
	_exit(0);
}

static void by_pipe(void)
{
	enum { ROUNDS = 12 };
	struct pair p;
	write_all("theirs", 0, O_TRUNC);
	int mine = open("mine", O_WRONLY | O_CREAT | O_TRUNC, 0600);
	CHECK(mine >= 0);
	pid_t child = other(&p, ROUNDS);
	CHECK_IS(close(mine), 0);
	mine = open("mine", O_WRONLY | O_TRUNC);
	int theirs = open("theirs", O_RDONLY);
	CHECK(mine >= 0 && theirs >= 0);
	fill(9);
	for (int round = 0; round < ROUNDS; round++) {
		size_t half = (size_t)(2 + round) * PIECE;
		CHECK_IS(lseek(theirs, 0, SEEK_SET), 0);
		expect(theirs, 0, half, (unsigned char)round);
		CHECK_IS(write(mine, buffer + round * PIECE, PIECE), PIECE);
		tell(p.ask[1]);
		hear(p.answer[0]);
		expect(theirs, half, SIZE, (unsigned char)(round + 1));
		CHECK_IS(read(theirs, buffer, 0), 0);
		fill(9);
	}
	await_exit(child, 0);
	CHECK(close(p.ask[1]) == 0 && close(p.answer[0]) == 0);
	CHECK_IS(close(mine), 0);
	CHECK_IS(close(theirs), 0);
}

static volatile sig_atomic_t told;

static void on_signal(int signal)
{
	(void)signal;
	told = 1;
}

/* Notified by a signal while it makes no call. */
static void by_signal(void)
{
	struct sigaction action = { .sa_handler = on_signal };
	CHECK_IS(sigaction(SIGUSR1, &action, NULL), 0);
	write_all("theirs", 3, O_TRUNC);
	int start[2];
	CHECK_IS(pipe(start), 0);
	told = 0;
	pid_t child = fork();
	CHECK(child >= 0);
	CHECK_IS(close(start[child != 0 ? 0 : 1]), 0);
	if (!child) {
		hear(start[0]);
		write_all("theirs", 77, 0);
		CHECK_IS(kill(getppid(), SIGUSR1), 0);
		_exit(0);
	}
	/* Wait until the file is old enough for its content to be cached. */
	rest_ms(30);
	int fd = open("theirs", O_RDONLY);
	CHECK(fd >= 0);
	expect(fd, 0, PIECE, 3);
	tell(start[1]);
	while (!told)
		;
	CHECK_IS(lseek(fd, 0, SEEK_SET), 0);
	expect(fd, 0, SIZE, 77);
	await_exit(child, 0);
	CHECK(close(fd) == 0 && close(start[1]) == 0);
}

/* Two processes count in one file under a lock, each through a descriptor for reading and one
 * for writing. */
static void count(int times)
{
	int in = open("count", O_RDONLY), out = open("count", O_WRONLY);
	CHECK(in >= 0 && out >= 0);
	for (int i = 0; i < times; i++) {
		struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
		CHECK_IS(fcntl(out, F_SETLKW, &lock), 0);
		int value;
		CHECK_IS(lseek(in, 0, SEEK_SET), 0);
		CHECK_IS(read(in, &value, sizeof value), sizeof value);
		value++;
		CHECK_IS(lseek(out, 0, SEEK_SET), 0);
		CHECK_IS(write(out, &value, sizeof value), sizeof value);
		lock.l_type = F_UNLCK;
		CHECK_IS(fcntl(out, F_SETLK, &lock), 0);
	}
	CHECK(close(in) == 0 && close(out) == 0);
}

static void by_lock(void)
{
	enum { TIMES = 25 };
	int zero = 0, fd = open("count", O_RDWR | O_CREAT | O_TRUNC, 0600);
	CHECK_IS(write(fd, &zero, sizeof zero), sizeof zero);
	CHECK_IS(close(fd), 0);
	pid_t child = fork();
	CHECK(child >= 0);
	count(TIMES);
	if (!child)
		_exit(0);
	await_exit(child, 0);
	fd = open("count", O_RDONLY);
	int value;
	CHECK_IS(read(fd, &value, sizeof value), sizeof value);
	CHECK_IS(value, 2 * TIMES);
	CHECK_IS(close(fd), 0);
}

static void offsets(const char *self)
{
	write_all("theirs", 5, O_TRUNC);
	int fd = open("theirs", O_RDONLY);
	CHECK(fd >= 0);
	expect(fd, 0, 2 * PIECE, 5);
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		expect(fd, 2 * PIECE, 3 * PIECE, 5);
		_exit(0);
	}
	await_exit(child, 0);
	expect(fd, 3 * PIECE, 4 * PIECE, 5);
	int twin = dup(fd);
	expect(twin, 4 * PIECE, 5 * PIECE, 5);
	expect(fd, 5 * PIECE, 6 * PIECE, 5);
	CHECK_IS(close(twin), 0);
	/* The same number for another file; then a second description of the same file. */
	CHECK_IS(close(fd), 0);
	write_all("mine", 50, O_TRUNC);
	CHECK_IS(open("mine", O_RDONLY), fd);
	expect(fd, 0, 3 * PIECE, 50);
	int out = open("mine", O_WRONLY);
	CHECK(out >= 0);
	fill(90);
	CHECK_IS(pwrite(out, buffer + 3 * PIECE, PIECE, 3 * PIECE), PIECE);
	expect(fd, 3 * PIECE, 4 * PIECE, 90);
	fill(50);
	CHECK_IS(pwrite(out, buffer + 3 * PIECE, PIECE, 3 * PIECE), PIECE);
	/* The offset continues, also in another program. */
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		int own = open("mine", O_RDONLY);
		expect(own, 0, 3 * PIECE, 50);
		CHECK_IS(lseek(own, 7, SEEK_CUR), 3 * PIECE + 7);
		char number[16];
		snprintf(number, sizeof number, "%d", own);
		execl(self, self, "reads", number, (char *)NULL);
		_exit(9);
	}
	await_exit(child, 0);
	/* Truncated under its reader, and longer again. */
	CHECK_IS(ftruncate(out, 4 * PIECE), 0);
	CHECK_IS(read(fd, buffer, PIECE), 0);
	fill(50);
	CHECK_IS(pwrite(out, buffer + 4 * PIECE, PIECE, 4 * PIECE), PIECE);
	expect(fd, 4 * PIECE, 5 * PIECE, 50);
	CHECK_IS(read(fd, buffer, PIECE), 0);
	struct stat about;
	CHECK_IS(write(out, "x", 1), 1);
	CHECK_IS(fstat(fd, &about), 0);
	CHECK_IS(about.st_size, 5 * PIECE);
	CHECK_IS(lseek(out, 0, SEEK_END), 5 * PIECE);
	CHECK(close(out) == 0 && close(fd) == 0);
}

/* A new limit applies at once, and so does the removal of a file's name. */
static void bounds(void)
{
	struct rlimit before, small;
	CHECK_IS(getrlimit(RLIMIT_FSIZE, &before), 0);
	CHECK(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
	int fd = open("mine", O_WRONLY | O_CREAT | O_TRUNC, 0600);
	CHECK(fd >= 0);
	CHECK_IS(write(fd, buffer, 100), 100);
	small = before;
	small.rlim_cur = 150;
	CHECK_IS(setrlimit(RLIMIT_FSIZE, &small), 0);
	CHECK_IS(write(fd, buffer, 100), 50);
	CHECK_IS(write(fd, buffer, 100), -1);
	CHECK_IS(errno, EFBIG);
	CHECK_IS(setrlimit(RLIMIT_FSIZE, &before), 0);
	CHECK_IS(write(fd, buffer, 10), 10);
	CHECK_IS(unlink("mine"), 0);
	void *volatile nowhere = (void *)8;
	CHECK_IS(write(fd, nowhere, 10), -1);
	CHECK_IS(errno, EFAULT);
	CHECK_IS(lseek(fd, -1, SEEK_SET), -1);
	CHECK_IS(errno, EINVAL);
	CHECK_IS(lseek(fd, 0, SEEK_CUR), 160);
	CHECK_IS(read(fd, buffer, 10), -1);
	CHECK_IS(errno, EBADF);
	CHECK_IS(close(fd), 0);
	CHECK_IS(write(fd, buffer, 10), -1);
	CHECK_IS(errno, EBADF);
}

int main(int argc, char **argv)
{
	if (argc == 3 && strcmp(argv[1], "reads") == 0) {
		int fd = atoi(argv[2]);
		CHECK_IS(lseek(fd, 0, SEEK_CUR), 3 * PIECE + 7);
		CHECK_IS(lseek(fd, -7, SEEK_CUR), 3 * PIECE);
		expect(fd, 3 * PIECE, 5 * PIECE, 50);
		return 0;
	}
	char self[PATH_MAX];
	ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
	CHECK(n > 0);
	self[n] = 0;
	enter_scratch();
	do {
		by_pipe();
		by_signal();
		by_lock();
		offsets(self);
		bounds();
	} while (going());
	CHECK_IS(unlink("theirs"), 0);
	CHECK_IS(unlink("count"), 0);
	leave_scratch();
	return pass();
}
