/* Proves: a file is mapped, read and unmapped at any moment of a move, over existing memory and in
 * free ranges. */
#include "program.h"
#include <sys/mman.h>

enum { LENGTH = 3 << 12 };

int main(void)
{
	enter_scratch();
	int fd = open("file", O_RDWR | O_CREAT, 0600);
	CHECK(fd >= 0);
	CHECK_IS(unlink("file"), 0);
	for (int i = 0; i < 3; i++)
		CHECK_IS(pwrite(fd, "abc" + i, 1, i << 12), 1);
	CHECK_IS(ftruncate(fd, LENGTH), 0);
	char *over = mmap(NULL, LENGTH, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(over != MAP_FAILED);
	do {
		for (int i = 0; i < 20; i++) {
			char *fixed = mmap(over, LENGTH, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0);
			CHECK(fixed == over);
			char *free = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
			CHECK(free != MAP_FAILED);
			for (int at = 0; at < 3; at++)
				CHECK(fixed[at << 12] == "abc"[at] && free[at << 12] == "abc"[at]);
			CHECK_IS(munmap(free, LENGTH), 0);
		}
	} while (going());
	close(fd);
	leave_scratch();
	return pass();
}
