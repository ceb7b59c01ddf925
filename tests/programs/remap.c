/* Proves: all uses of mremap: growing in place and elsewhere, shrinking, to a fixed address over
 * other memory, a part out of the middle, keeping the old mapping (DONTUNMAP); and what it
 * refuses. */
#include "program.h"
#include <sys/mman.h>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

enum { PAGE = 4096, PAGES = 32 };

static void fill(unsigned char *at, int pages, int seed)
{
	for (int i = 0; i < pages; i++)
		memset(at + i * PAGE, (seed + i * 3) & 0xff, 200);
}

static void expect(const unsigned char *at, int pages, int seed)
{
	for (int i = 0; i < pages; i++)
		CHECK(at[i * PAGE] == ((seed + i * 3) & 0xff) && at[i * PAGE + 199] == at[i * PAGE] && at[i * PAGE + 200] == 0);
}

static unsigned char *map(int pages, int prot)
{
	unsigned char *at = mmap(NULL, (size_t)pages * PAGE, prot, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(at != MAP_FAILED);
	return at;
}

int main(void)
{
	unsigned char *kept = map(PAGES, PROT_READ | PROT_WRITE); /* moved once each round, never written again */
	fill(kept, PAGES, 7);
	int turn = 0;
	do {
		turn++;
		unsigned char *room = map(4 * PAGES, PROT_NONE);
		/* grows in place, where there is room */
		unsigned char *a = mmap(room, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		CHECK(a == room);
		fill(a, PAGES, turn);
		CHECK_IS(munmap(room + PAGES * PAGE, 3 * PAGES * PAGE), 0);
		CHECK(mremap(a, PAGES * PAGE, 2 * PAGES * PAGE, 0) == a);
		expect(a, PAGES, turn);
		CHECK_IS(a[2 * PAGES * PAGE - 1], 0);
		/* no room, and it may not move */
		unsigned char *wall = mmap(a + 2 * PAGES * PAGE, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		CHECK(wall == a + 2 * PAGES * PAGE);
		CHECK(mremap(a, 2 * PAGES * PAGE, 3 * PAGES * PAGE, 0) == MAP_FAILED);
		CHECK_IS(errno, ENOMEM);
		unsigned char *b = mremap(a, 2 * PAGES * PAGE, 3 * PAGES * PAGE, MREMAP_MAYMOVE);
		CHECK(b != MAP_FAILED && b != a);
		expect(b, PAGES, turn);
		CHECK_IS(munmap(wall, PAGE), 0);
		/* smaller */
		CHECK(mremap(b, 3 * PAGES * PAGE, PAGES * PAGE, 0) == b);
		expect(b, PAGES, turn);
		/* eight pages out of its middle, over eight pages of other memory */
		unsigned char *c = map(PAGES, PROT_READ | PROT_WRITE);
		fill(c, PAGES, turn + 1);
		CHECK(mremap(b + 8 * PAGE, 8 * PAGE, 8 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, c + 4 * PAGE) == c + 4 * PAGE);
		expect(b, 8, turn);
		expect(b + 16 * PAGE, PAGES - 16, turn + 16 * 3);
		expect(c, 4, turn + 1);
		expect(c + 4 * PAGE, 8, turn + 8 * 3);
		expect(c + 12 * PAGE, PAGES - 12, turn + 1 + 12 * 3);
		/* the old mapping stays, and is empty */
		unsigned char *d = mremap(c + 12 * PAGE, 4 * PAGE, 4 * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP);
		CHECK(d != MAP_FAILED);
		expect(d, 4, turn + 1 + 12 * 3);
		for (int i = 0; i < 4 * PAGE; i += 100)
			CHECK_IS(c[12 * PAGE + i], 0);
		fill(c + 12 * PAGE, 4, turn + 2);
		expect(d, 4, turn + 1 + 12 * 3);
		expect(c + 12 * PAGE, 4, turn + 2);
		CHECK_IS(munmap(d, 4 * PAGE), 0);
		CHECK_IS(munmap(b, PAGES * PAGE), 0);
		CHECK_IS(munmap(c, PAGES * PAGE), 0);
		/* a hole cannot be moved */
		CHECK(mremap(b, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, a) == MAP_FAILED);
		CHECK_IS(errno, EFAULT);
		CHECK(mremap(kept, PAGE, PAGE, MREMAP_FIXED, a) == MAP_FAILED);
		CHECK_IS(errno, EINVAL);
		expect(kept, PAGES, 7);
		unsigned char *to = map(PAGES, PROT_NONE);
		kept = mremap(kept, PAGES * PAGE, PAGES * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
		CHECK(kept == to);
		expect(kept, PAGES, 7);
	} while (going());
	return pass();
}
