/* Proves: a file is opened, read, written, mapped, examined and synchronised again and again, while a child makes calls
 * that need no file. With an argument, that file is used, which must have 4096 zeros: its server may stall for long. */
#include "program.h"
#include <sys/mman.h>
#include <sys/syscall.h>

enum { SIZE = 4096, ROUNDS_PER_MAPPING = 16 };

static void child(int end)
{
	char byte;
	while (read(end, &byte, 1) < 0) {
		CHECK_IS(errno, EAGAIN);
		CHECK_IS(syscall(SYS_getppid), getppid());
		rest_ms(5);
	}
	_exit(0);
}

static void once(const char *name, bool maps)
{
	static const char zeros[SIZE];
	char block[SIZE];
	struct stat about;
	int fd = open(name, O_RDWR | O_CLOEXEC);
	CHECK(fd >= 0);
	CHECK_IS(read(fd, block, 100), 100);
	CHECK_IS(pread(fd, block, SIZE, 0), SIZE);
	CHECK(memcmp(block, zeros, SIZE) == 0);
	CHECK_IS(fstat(fd, &about), 0);
	CHECK_IS(about.st_size, SIZE);
	CHECK_IS(pwrite(fd, zeros, 64, 128), 64);
	CHECK_IS(fsync(fd), 0);
	CHECK_IS(stat(name, &about), 0);
	CHECK_IS(about.st_size, SIZE);
	if (maps) {
		char *at = mmap(NULL, SIZE, PROT_READ, MAP_PRIVATE, fd, 0);
		CHECK(at != MAP_FAILED);
		CHECK(memcmp(at, zeros, SIZE) == 0);
		CHECK_IS(munmap(at, SIZE), 0);
	}
	CHECK_IS(close(fd), 0);
}

int main(int argc, char **argv)
{
	const char *name = argc > 1 ? argv[1] : "file";
	int end[2];
	if (argc < 2) {
		enter_scratch();
		int fd = open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
		CHECK(fd >= 0 && ftruncate(fd, SIZE) == 0 && close(fd) == 0);
	}
	CHECK_IS(pipe2(end, O_NONBLOCK | O_CLOEXEC), 0);
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		close(end[1]);
		child(end[0]);
	}
	int round = 0;
	do {
		once(name, round++ % ROUNDS_PER_MAPPING == 0);
		rest_ms(5);
	} while (going());
	CHECK_IS(close(end[1]), 0);
	await_exit(pid, 0);
	if (argc < 2) {
		CHECK_IS(unlink(name), 0);
		leave_scratch();
	}
	return pass();
}
