/* Proves: the break goes up and down, and the memory granted is usable, wherever the program was
 * moved. */
#include "program.h"
#include <sys/syscall.h>

/* Not by sbrk: musl has none. */
static char *end_at(char *where) { return (char *)syscall(SYS_brk, where); }

int main(void)
{
	uint64_t random = 11;
	char *start = end_at(NULL), *end = start;
	do {
		CHECK(end_at(NULL) == end);
		size_t size = next_random(&random) % (2 << 20), had = (size_t)(end - start);
		if (size > had) {
			CHECK(end_at(start + size) == start + size);
			for (size_t i = had; i < size; i++)
				CHECK_IS(start[i], 0);
			memset(start + had, 1, size - had);
		} else {
			/* cleared first: the rest of its last page stays, and is granted again
			 * unchanged */
			memset(start + size, 0, had - size);
			CHECK(end_at(start + size) == start + size);
			for (size_t i = 0; i < size; i += 512)
				CHECK_IS(start[i], 1);
		}
		end = start + size;
		usleep(300);
	} while (going());
	return pass();
}
