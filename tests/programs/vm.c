/* Proves: mmap, munmap, mremap, mprotect, brk and MADV_DONTNEED in any order, with the right
 * content after each. */
#include "program.h"
#include <sys/mman.h>

enum { SLOTS = 40, PAGE = 4096 };

static struct slot {
	unsigned char *at;
	size_t pages;
	uint64_t seed;
	bool writable;
	bool split; /* a hole was mapped again: perhaps two areas now, which mremap does not treat as one */
} slots[SLOTS];

static uint64_t mark(const struct slot *s, size_t page) { return s->seed * 1000003 + page; }

static void fill(struct slot *s, size_t from)
{
	for (size_t page = from; page < s->pages; page++) {
		uint64_t value = mark(s, page);
		memcpy(s->at + page * PAGE + page % 500 * 8, &value, sizeof value);
	}
}

static void verify(const struct slot *s)
{
	for (size_t page = 0; page < s->pages; page++) {
		uint64_t value;
		memcpy(&value, s->at + page * PAGE + page % 500 * 8, sizeof value);
		CHECK(value == mark(s, page));
	}
}

static void change(struct slot *s, uint64_t *random)
{
	size_t pages = next_random(random) % 60 + 1;
	if (!s->at) {
		s->pages = pages, s->seed = next_random(random), s->writable = true, s->split = false;
		s->at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		CHECK(s->at != MAP_FAILED);
		for (size_t i = 0; i < pages * PAGE; i += 997)
			CHECK_IS(s->at[i], 0);
		fill(s, 0);
		return;
	}
	verify(s);
	switch (next_random(random) % 6) {
	case 0:
		CHECK_IS(munmap(s->at, s->pages * PAGE), 0);
		s->at = NULL;
		break;
	case 1: { /* another size, perhaps at another address */
		size_t before = s->pages;
		if (s->split)
			break;
		if (!s->writable)
			CHECK_IS(mprotect(s->at, s->pages * PAGE, PROT_READ | PROT_WRITE), 0);
		s->writable = true;
		s->at = mremap(s->at, before * PAGE, pages * PAGE, MREMAP_MAYMOVE);
		CHECK(s->at != MAP_FAILED);
		s->pages = pages;
		if (pages > before)
			fill(s, before);
		break;
	}
	case 2:
		s->writable = !s->writable;
		CHECK_IS(mprotect(s->at, s->pages * PAGE, s->writable ? PROT_READ | PROT_WRITE : PROT_READ), 0);
		break;
	case 3: /* dropped: zero, then filled again */
		if (!s->writable)
			break;
		CHECK_IS(madvise(s->at, s->pages * PAGE, MADV_DONTNEED), 0);
		for (size_t i = 0; i < s->pages * PAGE; i += 997)
			CHECK_IS(s->at[i], 0);
		s->seed = next_random(random);
		fill(s, 0);
		break;
	case 4: { /* moved to a chosen address */
		if (s->split)
			break;
		void *place = mmap(NULL, s->pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		CHECK(place != MAP_FAILED);
		s->at = mremap(s->at, s->pages * PAGE, s->pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place);
		CHECK(s->at == place);
		break;
	}
	case 5: /* a hole in the middle, mapped again */
		if (s->pages < 3 || !s->writable)
			break;
		s->split = true;
		CHECK_IS(munmap(s->at + PAGE, PAGE), 0);
		CHECK(mmap(s->at + PAGE, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
		      s->at + PAGE);
		fill(s, 0);
	}
	if (s->at)
		verify(s);
}

static void grow_and_shrink_break(uint64_t *random)
{
	unsigned char *end = sbrk(0);
	/* an allocation between these two would move the break: nothing here allocates */
	size_t size = next_random(random) % 300000 + 1;
	CHECK(sbrk((intptr_t)size) == end);
	for (size_t i = 0; i < size; i += 499)
		end[i] = (unsigned char)(i / 499);
	for (size_t i = 0; i < size; i += 499)
		CHECK_IS(end[i], (unsigned char)(i / 499));
	CHECK(sbrk(-(intptr_t)size) == end + size);
	CHECK(sbrk(0) == end);
}

int main(void)
{
	uint64_t random = 11;
#ifdef __GLIBC__
	bool with_break = true;
#else
	/* musl's sbrk refuses all arguments but 0 */
	bool with_break = sbrk(4096) != (void *)-1;
	if (with_break)
		sbrk(-4096);
#endif
	do {
		for (int i = 0; i < 300; i++)
			change(&slots[next_random(&random) % SLOTS], &random);
		if (with_break)
			grow_and_shrink_break(&random);
	} while (going());
	for (int i = 0; i < SLOTS; i++)
		if (slots[i].at)
			verify(&slots[i]);
	return pass();
}
