/* Proves: integer, x87 and SSE state, with the x87 control word and MXCSR rounding modes that
 * the program has set. */
#include "program.h"

static void set_x87(unsigned short word) { __asm__ volatile("fldcw %0" ::"m"(word)); }
static unsigned short get_x87(void)
{
	unsigned short word;
	__asm__ volatile("fnstcw %0" : "=m"(word));
	return word;
}
static void set_mxcsr(unsigned word) { __asm__ volatile("ldmxcsr %0" ::"m"(word)); }
static unsigned get_mxcsr(void)
{
	unsigned word;
	__asm__ volatile("stmxcsr %0" : "=m"(word));
	return word & ~0x3fu; /* without the sticky exception flags */
}

static uint64_t integers(void)
{
	uint64_t x = 88172645463325252u, sum = 0;
	for (int i = 0; i < 1000000; i++) {
		x ^= x << 13, x ^= x >> 7, x ^= x << 17;
		sum += x / ((x & 0xffff) | 1) + (uint64_t)__builtin_popcountll(x);
	}
	return sum;
}

/* Keeps values on the x87 stack over the whole loop, and nowhere else. */
static uint64_t extended(void)
{
	long double sum = 0;
	uint64_t turns = 300000;
	__asm__ volatile("fld1\n\tfldpi\n\tfldz\n"
			 "1:\tfadd %%st(1), %%st\n\tfsqrt\n\tfadd %%st(2), %%st\n\tdec %1\n\tjnz 1b\n"
			 "\tfstpt %0\n\tfstp %%st\n\tfstp %%st"
			 : "=m"(sum), "+r"(turns));
	uint64_t bits = 0;
	memcpy(&bits, &sum, sizeof bits);
	return bits;
}

static uint64_t doubles(void)
{
	double sum = 1, third = 1.0 / 3;
	for (int i = 1; i < 300000; i++) {
		volatile double quotient = sum / i;
		sum = sum * 0.999 + quotient * third + 1e-3;
	}
	uint64_t bits;
	memcpy(&bits, &sum, sizeof bits);
	return bits;
}

int main(void)
{
	/* nearest/extended, down/double, up/single, to zero/extended; SSE the same, the last
	 * with flush to zero */
	static const unsigned short x87[4] = { 0x37f, 0x67f, 0x87f, 0xf7f };
	static const unsigned mxcsr[4] = { 0x1f80, 0x3f80, 0x5f80, 0xff80 };
	uint64_t whole = integers(), long_sum[4], sum[4];
	for (int mode = 0; mode < 4; mode++) {
		set_x87(x87[mode]), set_mxcsr(mxcsr[mode]);
		long_sum[mode] = extended(), sum[mode] = doubles();
		say("mode %d: %016llx %016llx\n", mode, (unsigned long long)long_sum[mode],
		    (unsigned long long)sum[mode]);
	}
	say("integers: %016llx\n", (unsigned long long)whole);
	CHECK(sum[1] != sum[2] && long_sum[1] != long_sum[2]); /* the rounding modes made a difference */
	do {
		CHECK(integers() == whole);
		for (int mode = 0; mode < 4; mode++) {
			set_x87(x87[mode]), set_mxcsr(mxcsr[mode]);
			CHECK(extended() == long_sum[mode]);
			CHECK(doubles() == sum[mode]);
			CHECK_IS(get_x87(), x87[mode]);
			CHECK_IS(get_mxcsr(), mxcsr[mode]);
		}
		set_x87(0x37f), set_mxcsr(0x1f80);
	} while (going());
	return pass();
}
