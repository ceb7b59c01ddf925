/* Proves: a program blocked in the read of a pipe can move, and neither loses nor doubles a byte. A
 * child, which stays where it was forked, feeds the pipe slowly. */
#include "program.h"

static void feed(int out)
{
	unsigned char next = 0;
	do {
		unsigned char some[3] = { next, (unsigned char)(next + 1), (unsigned char)(next + 2) };
		CHECK_IS(write(out, some, 3), 3);
		next = (unsigned char)(next + 3);
		rest_ms(next % 4 == 0 ? 150 : 15);
	} while (going());
	_exit(7);
}

int main(void)
{
	int ends[2];
	CHECK_IS(pipe(ends), 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		close(ends[0]);
		feed(ends[1]);
	}
	close(ends[1]);
	unsigned char next = 0, got[16];
	uint64_t total = 0;
	for (;;) {
		ssize_t n = read(ends[0], got, sizeof got);
		CHECK(n >= 0);
		if (n == 0)
			break;
		for (ssize_t i = 0; i < n; i++, next++)
			CHECK_IS(got[i], next);
		total += (uint64_t)n;
	}
	CHECK(total > 0 && total % 3 == 0);
	await_exit(child, 7);
	return pass();
}
