/* Proves: faults are caught where they happen: SIGSEGV with its address (unmapped, read-only),
 * SIGBUS past the end of a file, SIGFPE, SIGILL, SIGTRAP; and the handler may jump out, or
 * repair the mapping and return. */
#include "program.h"
#include <setjmp.h>
#include <sys/mman.h>

static sigjmp_buf way_out;
static void *volatile address;
static volatile int code;
static char *volatile mend;

/* By inline assembly: in C it is undefined behaviour, and the compiler could drop it. */
static void divide_by_zero(void)
{
	__asm__ volatile("xor %%ecx, %%ecx\n\tmov $1, %%eax\n\tcltd\n\tidiv %%ecx" ::: "eax", "ecx", "edx", "cc");
}

static void on(int signal, siginfo_t *info, void *context)
{
	(void)context;
	address = info->si_addr, code = info->si_code;
	if (mend && signal == SIGSEGV) {
		CHECK_IS(mprotect(mend, 4096, PROT_READ | PROT_WRITE), 0);
		mend = NULL;
		return;
	}
	siglongjmp(way_out, signal);
}

int main(void)
{
	int faults[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP };
	struct sigaction action = { .sa_sigaction = on, .sa_flags = SA_SIGINFO };
	for (int i = 0; i < 5; i++)
		CHECK_IS(sigaction(faults[i], &action, NULL), 0);
	enter_scratch();
	int fd = open("short", O_RDWR | O_CREAT, 0600);
	CHECK(fd >= 0 && write(fd, "short", 5) == 5);
	char *file = mmap(NULL, 8192, PROT_READ, MAP_PRIVATE, fd, 0);
	char *page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(file != MAP_FAILED && page != MAP_FAILED);
	do {
		volatile char *bad = (char *)0x10;
		int came = sigsetjmp(way_out, 1);
		if (came == 0)
			*bad = 1;
		CHECK_IS(came, SIGSEGV);
		CHECK(address == (void *)0x10);
		CHECK_IS(code, SEGV_MAPERR);

		came = sigsetjmp(way_out, 1);
		if (came == 0)
			*(volatile char *)(page + 100) = 1;
		CHECK_IS(came, SIGSEGV);
		CHECK(address == page + 100);
		CHECK_IS(code, SEGV_ACCERR);

		mend = page;
		*(volatile char *)(page + 200) = 7; /* faults once, is repaired, and continues */
		CHECK(mend == NULL && page[200] == 7 && page[100] == 0);
		page[200] = 0;
		CHECK_IS(mprotect(page, 4096, PROT_READ), 0);

		CHECK(memcmp(file, "short", 6) == 0);
		came = sigsetjmp(way_out, 1);
		if (came == 0)
			(void)*(volatile char *)(file + 4096);
		CHECK_IS(came, SIGBUS);
		CHECK(address == file + 4096);
		CHECK_IS(code, BUS_ADRERR);

		came = sigsetjmp(way_out, 1);
		if (came == 0)
			divide_by_zero();
		CHECK_IS(came, SIGFPE);
		CHECK_IS(code, FPE_INTDIV);
		came = sigsetjmp(way_out, 1);
		if (came == 0)
			__asm__ volatile("ud2");
		CHECK_IS(came, SIGILL);
		came = sigsetjmp(way_out, 1);
		if (came == 0)
			__asm__ volatile("int3");
		CHECK_IS(came, SIGTRAP);
		for (volatile int spin = 0; spin < 1000000; spin++)
			;
	} while (going());
	CHECK_IS(unlink("short"), 0);
	leave_scratch();
	return pass();
}
