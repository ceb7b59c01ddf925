/* Proves: setjmp and longjmp over many frames, repeatedly. */
#include "program.h"
#include <setjmp.h>

static jmp_buf way_out;

__attribute__((noinline)) static int descend(int depth, int value)
{
	volatile char frame[512];
	frame[depth % 512] = (char)value;
	if (depth == 0)
		longjmp(way_out, value);
	/* the sum prevents a tail call */
	return descend(depth - 1, value) + frame[depth % 512];
}

int main(void)
{
	volatile int round = 1;
	do {
		for (volatile int i = 1; i < 2000; i++) {
			volatile int before = i * round;
			int came = setjmp(way_out);
			if (came == 0)
				descend(i % 300, i);
			CHECK_IS(came, i);
			CHECK_IS(before, i * round);
		}
		round = round % 1000 + 1;
	} while (going());
	return pass();
}
