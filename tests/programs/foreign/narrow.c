/* Proves, by being refused: 32-bit code is not moved. It needs no 32-bit libraries: it prints that
 * it runs, waits until the file TERN_UNTIL exists, and prints PASS. */

enum { SYS_EXIT = 1, SYS_WRITE = 4, SYS_ACCESS = 33, SYS_NANOSLEEP = 162 };

static int call(int nr, long a, long b, long c)
{
	int result;
	__asm__ volatile("int $0x80" : "=a"(result) : "a"(nr), "b"(a), "c"(b), "d"(c) : "memory");
	return result;
}

/* The value after NAME= in this string, if it begins so. */
static const char *value(const char *string, const char *name)
{
	while (*name && *string == *name)
		string++, name++;
	return *name ? 0 : string;
}

__attribute__((used)) static void run(long *stack)
{
	long arguments = stack[0];
	const char *until = 0;
	for (char **one = (char **)(stack + arguments + 2); *one && !until; one++)
		until = value(*one, "TERN_UNTIL=");
	call(SYS_WRITE, 1, (long)"held\n", 5);
	long pause[2] = { 0, 20 * 1000 * 1000 };
	while (until && call(SYS_ACCESS, (long)until, 0, 0) != 0)
		call(SYS_NANOSLEEP, (long)pause, 0, 0);
	call(SYS_WRITE, 1, (long)"PASS\n", 5);
	call(SYS_EXIT, 0, 0, 0);
}

__asm__(".globl _start\n_start:\n\tmov %esp, %eax\n\tpush %eax\n\tcall run\n");
