/* Proves: reservations of terabytes (PROT_NONE, and writable with MAP_NORESERVE) as garbage
 * collectors and sanitizers make them, with pages committed, used and released here and there;
 * guard pages beside them; MAP_FIXED_NOREPLACE. */
#include "program.h"
#include <setjmp.h>
#include <sys/mman.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

enum { PAGE = 4096, SPOTS = 64, BULK = 12 << 20 };
static const size_t NONE = (size_t)16 << 40, LOOSE = (size_t)1 << 40;

static sigjmp_buf way_out;
static char *volatile address;
static volatile int code;

static void on(int signal, siginfo_t *info, void *context)
{
	(void)context;
	address = info->si_addr, code = info->si_code;
	siglongjmp(way_out, signal);
}

static void faults(char *at, int wanted)
{
	int came = sigsetjmp(way_out, 1);
	if (came == 0)
		(void)*(volatile char *)at;
	CHECK_IS(came, SIGSEGV);
	CHECK(address == at);
	CHECK_IS(code, wanted);
}

int main(void)
{
	struct sigaction action = { .sa_sigaction = on, .sa_flags = SA_SIGINFO };
	CHECK_IS(sigaction(SIGSEGV, &action, NULL), 0);
	const int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
	char *none = mmap(NULL, NONE, PROT_NONE, kind, -1, 0);
	char *loose = mmap(NULL, LOOSE, PROT_READ | PROT_WRITE, kind, -1, 0);
	CHECK(none != MAP_FAILED && loose != MAP_FAILED);
	char *committed[SPOTS], *touched[SPOTS];
	uint64_t random = 5, turn = 0;
	for (int i = 0; i < SPOTS; i++) {
		committed[i] = none + (NONE / SPOTS) * (size_t)i + next_random(&random) % 100000 * PAGE + PAGE;
		touched[i] = loose + (LOOSE / SPOTS) * (size_t)i + next_random(&random) % 100000 * PAGE + PAGE;
		CHECK_IS(mprotect(committed[i], 2 * PAGE, PROT_READ | PROT_WRITE), 0);
		memset(committed[i], i, 2 * PAGE);
		memset(touched[i], i, PAGE);
	}
	/* enough for its writes to be tracked while it is sent */
	char *much = malloc(BULK);
	CHECK(much != NULL);
	memset(much, 0x11, BULK);
	do {
		much[turn % BULK]++;
		for (int i = 0; i < SPOTS; i++) {
			/* neighbours: a guard page, and an untouched page */
			CHECK(committed[i][0] == i && committed[i][2 * PAGE - 1] == i);
			CHECK(touched[i][0] == i && touched[i][PAGE - 1] == i && touched[i][-1] == 0);
		}
		int i = (int)(turn++ % SPOTS);
		faults(committed[i] - 1, SEGV_ACCERR);
		faults(committed[i] + 2 * PAGE, SEGV_ACCERR);
		/* released, and committed elsewhere nearby */
		if (turn % 2) {
			CHECK_IS(madvise(committed[i], 2 * PAGE, MADV_DONTNEED), 0);
			CHECK_IS(mprotect(committed[i], 2 * PAGE, PROT_NONE), 0);
		} else { /* as a garbage collector does it: mapped over it */
			CHECK(mmap(committed[i], 2 * PAGE, PROT_NONE, kind | MAP_FIXED, -1, 0) == committed[i]);
		}
		faults(committed[i], SEGV_ACCERR);
		committed[i] += 16 * PAGE;
		CHECK_IS(mprotect(committed[i], 2 * PAGE, PROT_READ | PROT_WRITE), 0);
		CHECK(committed[i][0] == 0 && committed[i][2 * PAGE - 1] == 0);
		memset(committed[i], i, 2 * PAGE);
		CHECK_IS(madvise(touched[i], PAGE, MADV_DONTNEED), 0);
		CHECK_IS(touched[i][17], 0);
		touched[i] += PAGE;
		memset(touched[i], i, PAGE);
		/* a taken range is not replaced, and a free one is granted exactly there */
		CHECK(mmap(none, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED);
		CHECK_IS(errno, EEXIST);
		char *place = mmap(NULL, 64 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		CHECK(place != MAP_FAILED);
		CHECK_IS(munmap(place, 64 * PAGE), 0);
		CHECK(mmap(place, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == place);
		CHECK_IS(munmap(place, PAGE), 0);
		faults(place, SEGV_MAPERR);
		rest_ms(1);
	} while (going());
	for (int i = 0; i < BULK; i++)
		CHECK_IS(much[i], 0x11 + (int)((turn + BULK - 1 - (uint64_t)i) / BULK));
	return pass();
}
