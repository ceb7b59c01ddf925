/* Proves: a stack of 6 MiB, with a pattern in each frame, survives moves while it grows and
 * shrinks. */
#include "program.h"

enum { FRAME = 2048, DEPTH = 6 * 1024 * 1024 / (FRAME + 128) };

__attribute__((noinline)) static uint64_t descend(int depth, uint64_t seed)
{
	volatile uint64_t here[FRAME / 8];
	for (int i = 0; i < FRAME / 8; i++)
		here[i] = seed + (uint64_t)i * (uint64_t)depth;
	uint64_t sum = depth == 0 ? seed : descend(depth - 1, seed * 3 + 1);
	for (int i = 0; i < FRAME / 8; i++) {
		CHECK(here[i] == seed + (uint64_t)i * (uint64_t)depth);
		sum += here[i];
	}
	return sum;
}

int main(void)
{
	uint64_t first = descend(DEPTH, 1);
	say("sum %016llx\n", (unsigned long long)first);
	do
		CHECK(descend(DEPTH, 1) == first);
	while (going());
	return pass();
}
