/* Proves: attributes, content and end of a file that are read right after the open are current, as
 * far as the program can know; a closed descriptor is closed for everything that follows, and for
 * every process that waits for the close; and reads and writes in several pieces give the same as
 * in one. */
#include "program.h"
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <termios.h>

enum { SMALL = 5000, LARGE = 150000, PIECE = 100000 };
static unsigned char buffer[LARGE + 1];

static void make(const char *name, size_t size, unsigned char with)
{
	int fd = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
	CHECK(fd >= 0);
	for (size_t i = 0; i < size; i++)
		buffer[i] = (unsigned char)(with + i % 251);
	CHECK_IS(write(fd, buffer, size), size);
	CHECK_IS(close(fd), 0);
}

static void expect(const unsigned char *got, size_t at, size_t n, unsigned char with)
{
	for (size_t i = 0; i < n; i++)
		CHECK_IS(got[i], (unsigned char)(with + (at + i) % 251));
}

static void tell(int fd)
{
	CHECK_IS(write(fd, "x", 1), 1);
}

static void hear(int fd)
{
	char c;
	CHECK_IS(read(fd, &c, 1), 1);
}

/* A descriptor's attributes must be those of the name, obtained by another call. */
static void about(int fd, const char *name)
{
	struct stat by_fd, by_name;
	CHECK_IS(fstat(fd, &by_fd), 0);
	unsigned char wide[2][256];
	memset(wide, 7, sizeof wide);
	CHECK_IS(syscall(SYS_statx, fd, "", AT_EMPTY_PATH, 0xfff, wide[0]), 0);
	struct stat again;
	CHECK_IS(syscall(SYS_newfstatat, fd, "", &again, AT_EMPTY_PATH), 0);
	CHECK_IS(lstat(name, &by_name), 0);
	CHECK_IS(syscall(SYS_statx, AT_FDCWD, name, AT_SYMLINK_NOFOLLOW, 0xfff, wide[1]), 0);
	/* A prefetch of its content may have changed the access time meanwhile. */
	by_fd.st_atim = again.st_atim = by_name.st_atim;
	memcpy(wide[0] + 64, wide[1] + 64, 16);
	CHECK_IS(memcmp(&by_fd, &by_name, sizeof by_fd), 0);
	CHECK_IS(memcmp(&again, &by_name, sizeof again), 0);
	CHECK_IS(memcmp(wide[0], wide[1], sizeof wide[0]), 0);
	CHECK_IS(syscall(SYS_newfstatat, fd, "", 8, AT_EMPTY_PATH), -1);
	CHECK_IS(errno, EFAULT);
	CHECK_IS(isatty(fd), 0);
	CHECK_IS(errno, ENOTTY);
}

static void whole(const char *name, size_t size, unsigned char with)
{
	struct stat s;
	int fd = open(name, O_RDONLY);
	CHECK(fd >= 0);
	CHECK_IS(fstat(fd, &s), 0);
	CHECK_IS(s.st_size, size);
	for (size_t at = 0; at < size;) {
		ssize_t n = read(fd, buffer, PIECE);
		CHECK(n > 0);
		expect(buffer, at, (size_t)n, with);
		at += (size_t)n;
	}
	CHECK_IS(read(fd, buffer, 10), 0);
	CHECK_IS(read(fd, buffer, 10), 0);
	CHECK_IS(close(fd), 0);
}

static void plain(void)
{
	make("small", SMALL, 1);
	make("large", LARGE, 2);
	make("empty", 0, 0);
	/* Wait until the files are old enough to be prefetched. */
	rest_ms(30);
	const char *names[] = { "small", "large", "empty" };
	for (int i = 0; i < 3; i++) {
		int fd = open(names[i], O_RDONLY);
		CHECK(fd >= 0);
		about(fd, names[i]);
		CHECK_IS(close(fd), 0);
	}
	whole("small", SMALL, 1);
	whole("large", LARGE, 2);
	whole("empty", 0, 0);
	/* Its own writes are visible. */
	struct stat s;
	int flags[] = { O_WRONLY, O_RDWR };
	for (int i = 0; i < 2; i++) {
		int fd = open("own", flags[i] | O_CREAT | O_EXCL, 0640);
		CHECK(fd >= 0);
		CHECK(fstat(fd, &s) == 0 && s.st_size == 0 && (s.st_mode & 0777) == 0640);
		CHECK_IS(write(fd, "abc", 3), 3);
		CHECK(fstat(fd, &s) == 0 && s.st_size == 3);
		CHECK_IS(fchmod(fd, 0600), 0);
		CHECK(fstat(fd, &s) == 0 && (s.st_mode & 0777) == 0600);
		CHECK_IS(close(fd), 0);
		if (i == 0)
			CHECK_IS(unlink("own"), 0);
	}
	int in = open("own", O_RDONLY), out = open("own", O_WRONLY | O_APPEND);
	CHECK(in >= 0 && out >= 0);
	CHECK_IS(write(out, "def", 3), 3);
	CHECK(fstat(in, &s) == 0 && s.st_size == 6);
	CHECK_IS(read(in, buffer, 10), 6);
	CHECK_IS(read(in, buffer, 10), 0);
	CHECK_IS(write(out, "g", 1), 1);
	CHECK_IS(read(in, buffer, 10), 1);
	CHECK(close(in) == 0 && close(out) == 0);
	CHECK_IS(unlink("own"), 0);
}

/* Another process changes the file between the open and the next call, and reports that. */
static void by_pipe(void)
{
	enum { ROUNDS = 12 };
	int ask[2], answer[2];
	CHECK(pipe(ask) == 0 && pipe(answer) == 0);
	make("theirs", SMALL, 0);
	pid_t child = fork();
	CHECK(child >= 0);
	CHECK(close(ask[child ? 0 : 1]) == 0 && close(answer[child ? 1 : 0]) == 0);
	if (!child) {
		for (int round = 1; round <= ROUNDS; round++) {
			hear(ask[0]);
			/* Of the same length, or longer. */
			make("theirs", SMALL + (size_t)(round / 2), (unsigned char)round);
			tell(answer[1]);
		}
		_exit(0);
	}
	for (int round = 1; round <= ROUNDS; round++) {
		rest_ms(round % 3 * 12);
		int fd = open("theirs", O_RDONLY);
		CHECK(fd >= 0);
		size_t was = SMALL + (size_t)((round - 1) / 2), is = SMALL + (size_t)(round / 2), at = 0;
		struct stat s;
		if (round % 4 > 1) {
			CHECK(fstat(fd, &s) == 0 && s.st_size == (off_t)was);
			CHECK_IS(read(fd, buffer, 100), 100);
			expect(buffer, 0, 100, (unsigned char)(round - 1));
			at = 100;
		}
		if (round % 4 == 3) {
			at = was;
			CHECK_IS(read(fd, buffer, PIECE), was - 100);
			CHECK_IS(read(fd, buffer, PIECE), 0);
		}
		tell(ask[1]);
		hear(answer[0]);
		CHECK(fstat(fd, &s) == 0 && s.st_size == (off_t)is);
		CHECK_IS(read(fd, buffer, PIECE), is - at);
		expect(buffer, at, is - at, (unsigned char)round);
		CHECK_IS(read(fd, buffer, PIECE), 0);
		CHECK_IS(close(fd), 0);
	}
	await_exit(child, 0);
	CHECK(close(ask[1]) == 0 && close(answer[0]) == 0);
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
	int start[2];
	CHECK_IS(pipe(start), 0);
	make("theirs", SMALL, 3);
	told = 0;
	pid_t child = fork();
	CHECK(child >= 0);
	CHECK_IS(close(start[child ? 0 : 1]), 0);
	if (!child) {
		hear(start[0]);
		/* The file may be open by now or not: both are right. */
		rest_ms(2);
		make("theirs", SMALL + 1, 77);
		CHECK_IS(kill(getppid(), SIGUSR1), 0);
		_exit(0);
	}
	rest_ms(30);
	tell(start[1]);
	int fd = open("theirs", O_RDONLY);
	CHECK(fd >= 0);
	while (!told)
		;
	struct stat s;
	CHECK_IS(fstat(fd, &s), 0);
	CHECK_IS(s.st_size, SMALL + 1);
	CHECK_IS(read(fd, buffer, PIECE), SMALL + 1);
	expect(buffer, 0, SMALL + 1, 77);
	await_exit(child, 0);
	CHECK(close(fd) == 0 && close(start[1]) == 0);
}

static int opened(void)
{
	int fd = open("small", O_RDONLY);
	CHECK(fd >= 0);
	CHECK_IS(read(fd, buffer, 10), 10);
	return fd;
}

/* A closed descriptor is closed, whatever comes next. */
static void closed(const char *self)
{
	int fd = opened(), other[2];
	struct stat s;
	CHECK_IS(close(fd), 0);
	CHECK_IS(opened(), fd);
	CHECK_IS(close(fd), 0);
	CHECK_IS(close(fd), -1);
	CHECK_IS(errno, EBADF);
#define GONE(call)                        \
	do {                              \
		CHECK_IS(opened(), fd);   \
		CHECK_IS(close(fd), 0);   \
		CHECK((call) == -1);      \
		CHECK_IS(errno, EBADF);   \
	} while (0)
	GONE(read(fd, buffer, 1));
	GONE(readv(fd, &(struct iovec){ buffer, 1 }, 1));
	GONE(lseek(fd, 0, SEEK_CUR));
	GONE(fstat(fd, &s));
	GONE(fcntl(fd, F_GETFD));
	GONE(ioctl(fd, TCGETS, buffer));
	GONE(dup(fd));
	GONE(dup2(fd, fd));
	GONE(fsync(fd));
	GONE((long)mmap(NULL, 10, PROT_READ, MAP_PRIVATE, fd, 0));
	CHECK(opened() == fd && close(fd) == 0);
	CHECK_IS(dup(1), fd);
	CHECK(close(fd) == 0 && opened() == fd && close(fd) == 0);
	CHECK_IS(pipe(other), 0);
	CHECK_IS(other[0], fd);
	CHECK(close(other[0]) == 0 && close(other[1]) == 0);
	CHECK(opened() == fd && close(fd) == 0);
	CHECK_IS(socket(AF_UNIX, SOCK_STREAM, 0), fd);
	CHECK(close(fd) == 0 && opened() == fd && close(fd) == 0);
	char link[32], to[PATH_MAX];
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	CHECK_IS(readlink(link, to, sizeof to), -1);
	CHECK_IS(errno, ENOENT);
	/* Several, closed in another order, and one that stays open. */
	int three[] = { opened(), opened(), opened() };
	CHECK(close(three[2]) == 0 && close(three[0]) == 0);
	CHECK_IS(read(three[1], buffer, 10), 10);
	expect(buffer, 10, 10, 1);
	CHECK_IS(opened(), three[0]);
	CHECK(close(three[0]) == 0 && close(three[1]) == 0);
	/* At the limit of open files. */
	struct rlimit before, small;
	CHECK_IS(getrlimit(RLIMIT_NOFILE, &before), 0);
	small = before;
	small.rlim_cur = (rlim_t)fd + 1;
	CHECK_IS(setrlimit(RLIMIT_NOFILE, &small), 0);
	for (int i = 0; i < 5; i++) {
		CHECK_IS(opened(), fd);
		CHECK_IS(open("small", O_RDONLY), -1);
		CHECK_IS(errno, EMFILE);
		CHECK_IS(close(fd), 0);
	}
	CHECK_IS(setrlimit(RLIMIT_NOFILE, &before), 0);
	/* Neither a child nor another program has it. */
	CHECK(opened() == fd && close(fd) == 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		char number[16];
		CHECK(fcntl(fd, F_GETFD) == -1 && errno == EBADF);
		CHECK(opened() == fd && close(fd) == 0);
		snprintf(number, sizeof number, "%d", fd);
		execl(self, self, "closed", number, (char *)NULL);
		_exit(9);
	}
	await_exit(child, 0);
}

/* A process that waits for the end of file gets it, though the program makes no further call. */
static void awaited(void)
{
	enum { RECORD, FLOCK, WATCH, WAYS };
	for (int way = 0; way < WAYS; way++) {
		int start[2], watch = -1;
		CHECK_IS(pipe(start), 0);
		told = 0;
		pid_t child = fork();
		CHECK(child >= 0);
		CHECK_IS(close(start[child ? 0 : 1]), 0);
		if (!child) {
			int fd = open("small", O_RDWR);
			CHECK(fd >= 0);
			if (way == WATCH) {
				watch = inotify_init1(0);
				CHECK(watch >= 0 && inotify_add_watch(watch, "small", IN_CLOSE_NOWRITE) >= 0);
				CHECK_IS(kill(getppid(), SIGUSR1), 0);
			}
			hear(start[0]);
			struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
			if (way == RECORD)
				CHECK_IS(fcntl(fd, F_SETLKW, &lock), 0);
			else if (way == FLOCK)
				CHECK_IS(flock(fd, LOCK_EX), 0);
			else
				CHECK(read(watch, buffer, 4096) > 0);
			CHECK_IS(kill(getppid(), SIGUSR1), 0);
			_exit(0);
		}
		while (way == WATCH && !told)
			;
		told = 0;
		int fd = open("small", O_RDONLY);
		CHECK(fd >= 0);
		struct flock lock = { .l_type = F_RDLCK, .l_whence = SEEK_SET };
		if (way == RECORD)
			CHECK_IS(fcntl(fd, F_SETLK, &lock), 0);
		else if (way == FLOCK)
			CHECK_IS(flock(fd, LOCK_EX), 0);
		tell(start[1]);
		CHECK_IS(read(fd, buffer, 10), 10);
		CHECK_IS(close(fd), 0);
		while (!told)
			;
		await_exit(child, 0);
		CHECK_IS(close(start[1]), 0);
	}
}

static void pieces(void)
{
	unsigned char a[10], b[700], c[3];
	struct iovec all[] = { { a, sizeof a }, { NULL, 0 }, { b, sizeof b }, { c, sizeof c } };
	size_t sum = sizeof a + sizeof b + sizeof c;
	int out = open("own", O_WRONLY | O_CREAT | O_TRUNC, 0600);
	CHECK(out >= 0);
	for (int round = 0; round < 4; round++) {
		size_t at = (size_t)round * sum;
		for (size_t i = 0; i < sum; i++) {
			unsigned char byte = (unsigned char)(9 + (at + i) % 251);
			if (i < sizeof a)
				a[i] = byte;
			else if (i < sizeof a + sizeof b)
				b[i - sizeof a] = byte;
			else
				c[i - sizeof a - sizeof b] = byte;
		}
		if (round % 2)
			CHECK_IS(pwritev(out, all, 4, (off_t)at), sum);
		else
			CHECK_IS(lseek(out, (off_t)at, SEEK_SET), at);
		if (round % 2 == 0)
			CHECK_IS(writev(out, all, 4), sum);
	}
	CHECK_IS(syscall(SYS_writev, out, all, -1), -1);
	CHECK_IS(errno, EINVAL);
	CHECK_IS(syscall(SYS_writev, out, 8, 2), -1);
	CHECK_IS(errno, EFAULT);
	CHECK_IS(lseek(out, 0, SEEK_CUR), 3 * sum);
	CHECK_IS(close(out), 0);
	rest_ms(20);
	int in = open("own", O_RDONLY);
	CHECK(in >= 0);
	for (int round = 0; round < 4; round++) {
		size_t at = (size_t)round * sum;
		memset(a, 0, sizeof a);
		memset(b, 0, sizeof b);
		memset(c, 0, sizeof c);
		if (round == 0)
			CHECK_IS(readv(in, all, 4), sum);
		else if (round == 1)
			CHECK_IS(syscall(SYS_preadv2, in, all, 4, -1L, 0L, 0), sum);
		else
			CHECK_IS(preadv(in, all, 4, (off_t)at), sum);
		expect(a, at, sizeof a, 9);
		expect(b, at + sizeof a, sizeof b, 9);
		expect(c, at + sizeof a + sizeof b, sizeof c, 9);
	}
	CHECK_IS(lseek(in, 0, SEEK_CUR), 2 * sum);
	CHECK_IS(lseek(in, (off_t)(4 * sum - 20), SEEK_SET), 4 * sum - 20);
	CHECK_IS(readv(in, all, 4), 20);
	expect(a, 4 * sum - 20, 10, 9);
	expect(b, 4 * sum - 10, 10, 9);
	CHECK_IS(readv(in, all, 4), 0);
	CHECK_IS(preadv(in, (struct iovec[]){ { a, 5 }, { (void *)8, 5 } }, 2, 0), 5);
	CHECK_IS(close(in), 0);
	CHECK_IS(unlink("own"), 0);
}

int main(int argc, char **argv)
{
	if (argc == 3 && strcmp(argv[1], "closed") == 0) {
		CHECK(fcntl(atoi(argv[2]), F_GETFD) == -1 && errno == EBADF);
		return 0;
	}
	char self[PATH_MAX];
	ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
	CHECK(n > 0);
	self[n] = 0;
	struct sigaction action = { .sa_handler = on_signal };
	CHECK_IS(sigaction(SIGUSR1, &action, NULL), 0);
	umask(022);
	enter_scratch();
	do {
		plain();
		by_pipe();
		by_signal();
		closed(self);
		awaited();
		pieces();
	} while (going());
	const char *names[] = { "small", "large", "empty", "theirs" };
	for (int i = 0; i < 4; i++)
		CHECK_IS(unlink(names[i]), 0);
	leave_scratch();
	return pass();
}
