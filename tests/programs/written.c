/* Proves: data written through a shared file mapping is in the file for every reader after it was
 * unmapped and closed, after its writer has ended or executed another program, and when it is
 * mapped again. */
#include "program.h"
#include <sys/mman.h>

enum { SIZE = 100000, STEP = 1000 };
static const char name[] = "written";

static char *map(int fd)
{
	char *at = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(at != MAP_FAILED);
	return at;
}

/* In steps, to leave time for moves. */
static void fill(char *at, char letter)
{
	for (int i = 0; i < SIZE; i += STEP) {
		memset(at + i, letter, STEP);
		if (i % 10000 == 0)
			rest_ms(5);
	}
}

static void is_in_file(char letter)
{
	static char all[SIZE];
	int fd = open(name, O_RDONLY);
	CHECK(fd >= 0);
	CHECK_IS(read(fd, all, SIZE), SIZE);
	CHECK_IS(close(fd), 0);
	for (int i = 0; i < SIZE; i++)
		CHECK_IS(all[i], letter);
}

/* A child writes, and ends in one of several ways. */
static void by_a_child(char letter, int how)
{
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		fill(map(open(name, O_RDWR | O_CLOEXEC)), letter);
		if (how == 1)
			execl("/bin/sh", "sh", "-c", "exit 3", NULL);
		_exit(3);
	}
	await_exit(child, 3);
	is_in_file(letter);
}

int main(void)
{
	enter_scratch();
	int fd = open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
	CHECK(fd >= 0 && ftruncate(fd, SIZE) == 0 && close(fd) == 0);
	do {
		fd = open(name, O_RDWR);
		char *at = map(fd);
		fill(at, 'a');
		CHECK_IS(munmap(at, SIZE), 0);
		CHECK_IS(close(fd), 0);
		rest_ms(5);
		is_in_file('a');
		fd = open(name, O_RDWR);
		at = map(fd);
		CHECK_IS(at[SIZE - 1], 'a');
		fill(at, 'b');
		CHECK_IS(munmap(at, SIZE), 0);
		/* without a close: by the same descriptor */
		char last = 0;
		CHECK_IS(pread(fd, &last, 1, SIZE - 1), 1);
		CHECK_IS(last, 'b');
		CHECK_IS(close(fd), 0);
		by_a_child('c', 0);
		by_a_child('d', 1);
	} while (going());
	CHECK_IS(unlink(name), 0);
	leave_scratch();
	return pass();
}
