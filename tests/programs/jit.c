/* Proves: generated code: written, protected, run, changed and run again; from a memfd that is
 * mapped privately; and beside a page without access rights. */
#include "program.h"
#include <sys/mman.h>
#include <sys/syscall.h>

enum { PAGE = 4096, FUNCTIONS = 64 };
typedef int (*function)(int);

/* lea VALUE(%rdi), %eax; ret */
static void put(unsigned char *at, int value)
{
	static const unsigned char code[] = { 0x8d, 0x87, 0, 0, 0, 0, 0xc3 };
	memcpy(at, code, sizeof code);
	memcpy(at + 2, &value, 4);
}

static int run(const unsigned char *at, int argument)
{
	function f;
	memcpy(&f, &at, sizeof f);
	return f(argument);
}

int main(void)
{
	unsigned char *arena =
		mmap(NULL, 3 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	CHECK(arena != MAP_FAILED);
	unsigned char *code = arena + PAGE;
	int file = (int)syscall(SYS_memfd_create, "code", 0);
	CHECK(file >= 0);
	static unsigned char page[PAGE];
	put(page + 64, 1000);
	CHECK_IS(write(file, page, PAGE), PAGE);
	unsigned char *mapped = mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, 0);
	unsigned char *own = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
	CHECK(mapped != MAP_FAILED && own != MAP_FAILED);
	int turn = 0;
	do {
		turn = (turn + 1) % 100000;
		CHECK_IS(mprotect(code, PAGE, PROT_READ | PROT_WRITE), 0);
		for (int i = 0; i < FUNCTIONS; i++)
			put(code + i * 64, turn + i);
		CHECK_IS(mprotect(code, PAGE, PROT_READ | PROT_EXEC), 0);
		for (int again = 0; again < 200; again++)
			for (int i = 0; i < FUNCTIONS; i++)
				CHECK_IS(run(code + i * 64, again), turn + i + again);
		/* writable and executable at once, changed between calls */
		CHECK_IS(mprotect(code, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC), 0);
		put(code, -turn);
		CHECK_IS(run(code, 1), 1 - turn);
		CHECK_IS(run(mapped + 64, 1), 1001);
		CHECK_IS(mprotect(own, PAGE, PROT_READ | PROT_WRITE), 0);
		put(own + 64, turn);
		CHECK_IS(mprotect(own, PAGE, PROT_READ | PROT_EXEC), 0);
		CHECK_IS(run(own + 64, 2), turn + 2);
	} while (going());
	/* writes to the private pages never reached the file */
	CHECK_IS(pread(file, page, PAGE, 0), PAGE);
	int kept;
	memcpy(&kept, page + 66, 4);
	CHECK_IS(kept, 1000);
	return pass();
}
