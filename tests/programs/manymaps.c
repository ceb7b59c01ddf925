/* Proves: very many mappings, of memory (`manymaps memory N`) or of as many files, private or shared
 * (`manymaps files N`, `manymaps shared N`), keep their content and protection; without arguments
 * a few of each. */
#include "program.h"
#include <setjmp.h>
#include <sys/mman.h>

enum { PAGE = 4096, MOST = 100000 };

static uint64_t mark(long at, uint64_t round) { return (uint64_t)at * 1000003 + round + 1; }

static sigjmp_buf after_fault;

static void faulted(int signal UNUSED) { siglongjmp(after_fault, 1); }

static bool writable(volatile char *at)
{
	struct sigaction catch = { .sa_handler = faulted }, before;
	volatile bool written = false;
	CHECK_IS(sigaction(SIGSEGV, &catch, &before), 0);
	if (!sigsetjmp(after_fault, 1)) {
		*at = *at;
		written = true;
	}
	CHECK_IS(sigaction(SIGSEGV, &before, NULL), 0);
	return written;
}

/* Every second page is read only, so that each is a mapping of its own. One is written per round. */
static void use_memory(long count)
{
	char *pages = mmap(NULL, (size_t)count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(pages != MAP_FAILED);
	uint64_t *rounds = calloc((size_t)count, sizeof *rounds);
	for (long i = 0; i < count; i++)
		*(uint64_t *)(pages + i * PAGE) = mark(i, 0);
	for (long i = 1; i < count; i += 2)
		CHECK_IS(mprotect(pages + i * PAGE, PAGE, PROT_READ), 0);
	say("mapped\n");
	uint64_t random = 7;
	for (uint64_t round = 1; round == 1 || going(); round++) {
		long at = (long)(next_random(&random) % (uint64_t)count) & ~1L;
		*(uint64_t *)(pages + at * PAGE) = mark(at, rounds[at] = round);
		for (long i = (long)round % 8; i < count; i += 8)
			CHECK(*(uint64_t *)(pages + i * PAGE) == mark(i, rounds[i]));
		rest_ms(1);
	}
	for (long i = 0; i < count; i++)
		CHECK(*(uint64_t *)(pages + i * PAGE) == mark(i, rounds[i]));
	CHECK(writable(pages) && !writable(pages + PAGE) && !writable(pages + (count / 2 * 2 - 1) * PAGE));
	free(rounds);
	CHECK_IS(munmap(pages, (size_t)count * PAGE), 0);
}

static void use_files(long count, int sharing)
{
	static uint64_t *maps[MOST];
	char name[32];
	enter_scratch();
	for (long i = 0; i < count; i++) {
		uint64_t content[16] = { mark(i, 0), mark(i, 1) };
		snprintf(name, sizeof name, "%ld", i);
		int fd = open(name, O_RDWR | O_CREAT, 0600);
		CHECK(fd >= 0);
		CHECK_IS(write(fd, content, sizeof content), sizeof content);
		maps[i] = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, sharing, fd, 0);
		CHECK(maps[i] != MAP_FAILED);
		CHECK_IS(close(fd), 0);
		if (i % 16 == 0)
			maps[i][1] = mark(i, 2);
	}
	say("mapped\n");
	for (long round = 0; round == 0 || going(); round++) {
		for (long i = round % 8; i < count; i += 8)
			CHECK(maps[i][0] == mark(i, 0) && maps[i][1] == mark(i, i % 16 == 0 ? 2 : 1));
		rest_ms(1);
	}
	for (long i = 0; i < count; i++) {
		CHECK(maps[i][0] == mark(i, 0) && maps[i][1] == mark(i, i % 16 == 0 ? 2 : 1));
		CHECK_IS(munmap(maps[i], PAGE), 0);
		snprintf(name, sizeof name, "%ld", i);
		CHECK_IS(unlink(name), 0);
	}
	leave_scratch();
}

int main(int argc, char **argv)
{
	long count = argc > 2 ? atol(argv[2]) : 200;
	CHECK(count > 1 && count <= MOST);
	if (argc < 2 || !strcmp(argv[1], "memory"))
		use_memory(count);
	if (argc < 2 || !strcmp(argv[1], "files"))
		use_files(count, MAP_PRIVATE);
	if (argc < 2 || !strcmp(argv[1], "shared"))
		use_files(count, MAP_SHARED);
	return pass();
}
