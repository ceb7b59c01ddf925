/* Proves: a blocking write of 1 MiB to a pipe is one call with one full count, however slowly a
 * child reads it, and wherever the writer is moved meanwhile. */
#include "program.h"

enum { BIG = 1 << 20 };
static unsigned char block[BIG];

static unsigned char byte(uint64_t at) { return (unsigned char)(at * 2654435761u >> 13); }

static void drain(int in)
{
	static unsigned char some[32768];
	uint64_t at = 0;
	for (;;) {
		ssize_t n = read(in, some, sizeof some);
		CHECK(n >= 0);
		if (n == 0)
			break;
		for (ssize_t i = 0; i < n; i++, at++)
			CHECK_IS(some[i], byte(at % BIG));
		rest_ms(4);
	}
	CHECK(at > 0);
	CHECK_IS(at % BIG, 0);
	_exit(0);
}

int main(void)
{
	int ends[2];
	CHECK_IS(pipe(ends), 0);
	for (uint64_t i = 0; i < BIG; i++)
		block[i] = byte(i);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		close(ends[1]);
		drain(ends[0]);
	}
	close(ends[0]);
	do
		CHECK_IS(write(ends[1], block, BIG), BIG);
	while (going());
	close(ends[1]);
	await_exit(child, 0);
	return pass();
}
