/* Proves: its command line and its initial environment are in /proc at every instant, also while
 * much memory is being sent. */
#include "program.h"
#include <sys/mman.h>

enum { SIZE = 24 << 20 };

static ssize_t show(const char *name, char *text, size_t size)
{
	int fd = open(name, O_RDONLY);
	CHECK(fd >= 0);
	ssize_t n = read(fd, text, size);
	CHECK(n > 0);
	close(fd);
	return n;
}

int main(void)
{
	static const char *const names[] = { "/proc/self/cmdline", "/proc/self/environ" };
	static char first[2][2048], again[2048];
	ssize_t length[2];
	unsigned char *much = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(much != MAP_FAILED);
	for (size_t i = 0; i < SIZE; i++)
		much[i] = (unsigned char)(i * 7 + 1);
	for (int i = 0; i < 2; i++) {
		length[i] = show(names[i], first[i], sizeof first[i]);
		CHECK(first[i][0] != 0);
	}
	size_t at = 0;
	do {
		for (int i = 0; i < 2; i++) {
			CHECK_IS(show(names[i], again, sizeof again), length[i]);
			if (memcmp(again, first[i], (size_t)length[i]) != 0)
				fail("FAIL %s is not what it was: \"%s\"\n", names[i], again);
		}
		for (int i = 0; i < 100; i++, at = (at + 4096) % SIZE)
			much[at]++;
	} while (going());
	return pass();
}
