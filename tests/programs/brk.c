/* Proves: the heap's end goes up and down by brk, and what is granted is there, wherever it was last moved. */
#include "program.h"
#include <sys/mman.h>

int main(void)
{
	uint64_t random = 11;
	char *start = sbrk(0), *end = start;
	CHECK(start != (void *)-1);
	do {
		CHECK(sbrk(0) == end);
		size_t size = next_random(&random) % (2 << 20), had = (size_t)(end - start);
		if (size > had) {
			CHECK(sbrk((intptr_t)(size - had)) == end);
			for (size_t i = had; i < size; i++)
				CHECK_IS(start[i], 0);
			memset(start + had, 1, size - had);
		} else {
			/* cleared first: the rest of its last page stays, and is granted again as it was */
			memset(start + size, 0, had - size);
			CHECK(sbrk(-(intptr_t)(had - size)) == end);
			for (size_t i = 0; i < size; i += 512)
				CHECK_IS(start[i], 1);
		}
		end = start + size;
		usleep(300);
	} while (going());
	return pass();
}
