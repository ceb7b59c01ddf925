/* Common code of the hostile guests. Each waits twice for a line: for "go", when it has been moved
 * away, and for "end", when the effects have been examined. Its first argument is an address near
 * the stub's range. */
#include "../program.h"
#include <setjmp.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>

enum { RANGE = 256 << 10, PAGE = 4096 };

/* Reads one line, and exits on any other. */
UNUSED static void await(const char *word)
{
	char line[16] = { 0 };
	size_t length = 0;
	while (length < sizeof line - 1) {
		ssize_t n = read(0, line + length, 1);
		if (n <= 0)
			_exit(98);
		if (line[length] == '\n')
			break;
		length++;
	}
	line[length] = 0;
	CHECK(strcmp(line, word) == 0);
}

UNUSED static void ready(void)
{
	say("ready\n");
	await("go");
}

UNUSED static void done(void)
{
	say("done\n");
	await("end");
}

UNUSED static bool mapped(uintptr_t at)
{
	unsigned char resident;
	return mincore((void *)at, PAGE, &resident) == 0;
}

/* The stub's range, which is mapped only while the program is away. mincore is not trapped. */
UNUSED static uintptr_t find_range(const char *area)
{
	uintptr_t near = strtoull(area, NULL, 0);
	for (uintptr_t at = near; at < near + (64 << 20); at += PAGE)
		if (mapped(at) && mapped(at + RANGE - PAGE))
			return at;
	fail("FAIL: there is no range at %#lx\n", (unsigned long)near);
}
