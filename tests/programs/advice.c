/* Proves: the semantics of madvise, wherever the memory is: DONTNEED and FREE, DONTFORK and
 * WIPEONFORK for a child, POPULATE, REMOVE and REPLACE done or refused, hints, guard pages; msync
 * and mincore; names for memory are no error. */
#include "program.h"
#include <setjmp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

enum { GUARD_INSTALL = 102, GUARD_REMOVE = 103 };
enum { PAGE = 4096, PAGES = 16, LEN = PAGE * PAGES };

static unsigned char *map(void)
{
	unsigned char *at = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(at != MAP_FAILED);
	memset(at, 0x5a, LEN);
	return at;
}

static bool is_mapped(unsigned char *at)
{
	unsigned char there[PAGES];
	return mincore(at, LEN, there) == 0;
}

static sigjmp_buf after_fault;

static void on_fault(UNUSED int signal)
{
	siglongjmp(after_fault, 1);
}

static bool faults(unsigned char *at)
{
	if (sigsetjmp(after_fault, 1))
		return true;
	*(volatile unsigned char *)at = 1;
	return false;
}

/* Pages 2 and 3 are guard pages, if the kernel has them (Linux 6.13), and pages 8 to 11 now and then. */
static unsigned char *map_guarded(void)
{
	unsigned char *at = map();
	if (madvise(at + 2 * PAGE, 2 * PAGE, GUARD_INSTALL) == 0)
		return at;
	CHECK_IS(errno, EINVAL);
	return NULL;
}

static void use_guards(unsigned char *at)
{
	CHECK(faults(at + 2 * PAGE) && faults(at + 4 * PAGE - 1));
	CHECK(at[2 * PAGE - 1] == 0x5a && at[4 * PAGE] == 0x5a);
	CHECK_IS(madvise(at + 8 * PAGE, 4 * PAGE, GUARD_INSTALL), 0);
	rest_ms(1);
	CHECK(faults(at + 8 * PAGE) && at[8 * PAGE - 1] == 0x5a && at[12 * PAGE] == 0x5a);
	CHECK_IS(madvise(at, LEN / 4, MADV_DONTNEED), 0);
	CHECK(faults(at + 2 * PAGE));
	memset(at, 0x5a, 2 * PAGE);
	CHECK_IS(madvise(at + 8 * PAGE, 4 * PAGE, GUARD_REMOVE), 0);
	rest_ms(1);
	CHECK(at[8 * PAGE] == 0 && at[12 * PAGE - 1] == 0);
	memset(at + 8 * PAGE, 0x5a, 4 * PAGE);
	/* removed and written, and a guard page again after a while */
	CHECK_IS(madvise(at + 3 * PAGE, PAGE, GUARD_REMOVE), 0);
	at[3 * PAGE] = 7;
	rest_ms(1);
	CHECK(at[3 * PAGE] == 7 && faults(at + 2 * PAGE));
	CHECK_IS(madvise(at + 3 * PAGE, PAGE, GUARD_INSTALL), 0);
}

int main(void)
{
	/* mapped for the whole run, so that most rounds see it after moves */
	unsigned char *not_forked = map(), *wiped = map(), *both = map(), *undone = map(), *inner = map();
	CHECK_IS(madvise(not_forked, LEN, MADV_DONTFORK), 0);
	CHECK_IS(madvise(wiped, LEN, MADV_WIPEONFORK), 0);
	CHECK_IS(madvise(both, LEN, MADV_WIPEONFORK), 0);
	CHECK_IS(madvise(both, LEN, MADV_DONTFORK), 0);
	CHECK_IS(madvise(undone, LEN, MADV_WIPEONFORK), 0);
	CHECK_IS(madvise(undone, LEN, MADV_KEEPONFORK), 0);
	CHECK_IS(madvise(inner + 4 * PAGE, 4 * PAGE, MADV_WIPEONFORK), 0);
	CHECK(signal(SIGSEGV, on_fault) != SIG_ERR);
	unsigned char *guarded = map_guarded();
	do {
		if (guarded)
			use_guards(guarded);
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			CHECK(!guarded || faults(guarded + 2 * PAGE));
			CHECK(!is_mapped(not_forked) && errno == ENOMEM && !is_mapped(both));
			for (int i = 0; i < LEN; i += 512) {
				CHECK_IS(wiped[i], 0);
				CHECK_IS(undone[i], 0x5a);
				CHECK_IS(inner[i], i / PAGE >= 4 && i / PAGE < 8 ? 0 : 0x5a);
			}
			/* inherited: a grandchild sees it wiped again */
			memset(wiped, 1, LEN);
			pid_t next = fork();
			CHECK(next >= 0);
			if (next == 0) {
				CHECK(wiped[0] == 0 && wiped[LEN - 1] == 0);
				_exit(8);
			}
			await_exit(next, 8);
			_exit(9);
		}
		await_exit(child, 9);
		CHECK(not_forked[5] == 0x5a && wiped[5] == 0x5a && both[5] == 0x5a);

		unsigned char *a = map();
		CHECK_IS(madvise(a, LEN, MADV_DONTFORK), 0);
		CHECK_IS(madvise(a, LEN, MADV_DOFORK), 0);
		static const int hints[] = { MADV_NORMAL, MADV_RANDOM, MADV_SEQUENTIAL, MADV_WILLNEED, MADV_HUGEPAGE,
					     MADV_NOHUGEPAGE, MADV_MERGEABLE, MADV_UNMERGEABLE, MADV_DONTDUMP, MADV_DODUMP,
					     MADV_COLD, MADV_PAGEOUT };
		for (size_t i = 0; i < sizeof hints / sizeof *hints; i++) {
			/* a kernel may be built without some of them, and returns EINVAL */
			CHECK(madvise(a, LEN, hints[i]) == 0 || errno == EINVAL || errno == EBADF);
			CHECK(a[0] == 0x5a && a[LEN - 1] == 0x5a);
		}
		CHECK_IS(madvise(a, LEN / 2, MADV_DONTNEED), 0);
		CHECK(a[0] == 0 && a[LEN / 2 - 1] == 0 && a[LEN / 2] == 0x5a);
		CHECK_IS(madvise(a, LEN / 2, MADV_POPULATE_WRITE), 0);
		unsigned char there[PAGES] = { 0 };
		CHECK_IS(mincore(a, LEN, there), 0);
		CHECK(a[0] == 0 && a[LEN / 2] == 0x5a);
		/* freed pages read as the old content or zero; pages written again are kept */
		CHECK_IS(madvise(a, LEN, MADV_FREE), 0);
		for (int i = 0; i < PAGES; i++)
			a[i * PAGE + 100] = (unsigned char)i;
		for (int i = 0; i < PAGES; i++) {
			CHECK_IS(a[i * PAGE + 100], (unsigned char)i);
			CHECK(a[i * PAGE] == 0 || a[i * PAGE] == 0x5a);
		}
		CHECK_IS(madvise(a, LEN, MADV_POPULATE_READ), 0);
		/* unmapped or unaligned ranges */
		CHECK_IS(munmap(a + 4 * PAGE, PAGE), 0);
		CHECK_IS(madvise(a, LEN, MADV_NORMAL), -1);
		CHECK_IS(errno, ENOMEM);
		CHECK_IS(madvise(a + 1, PAGE, MADV_NORMAL), -1);
		CHECK_IS(errno, EINVAL);
		CHECK_IS(madvise(a, PAGE, 12345), -1);
		CHECK_IS(errno, EINVAL);
		CHECK_IS(mincore(a, LEN, there), -1);
		CHECK_IS(errno, ENOMEM);
		CHECK_IS(msync(a, PAGE, MS_SYNC), 0);
		CHECK_IS(msync(a, LEN, MS_ASYNC), -1);
		CHECK_IS(errno, ENOMEM);
		/* PR_SET_VMA_ANON_NAME: EINVAL on a kernel without names */
		CHECK(prctl(0x53564d41, 0, a, PAGE, "mine") == 0 || errno == EINVAL);
		CHECK_IS(munmap(a, LEN), 0);
		rest_ms(1);
	} while (going());
	return pass();
}
