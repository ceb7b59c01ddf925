/* Proves: the AVX2 and AVX-512 registers, including mask registers, survive a move. Features
 * that the CPU lacks are skipped, and reported. */
#include "program.h"
#include <cpuid.h>

struct wide {
	_Alignas(64) unsigned char at[32][64];
	uint64_t mask[8];
};

static struct wide in, out;

__attribute__((noinline)) static void spin_avx2(uint64_t turns)
{
#define LOAD(n) "vmovdqa " #n "*64(%1), %%ymm" #n "\n\t"
#define STORE(n) "vmovdqa %%ymm" #n ", " #n "*64(%2)\n\t"
#define SIXTEEN(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7) M(8) M(9) M(10) M(11) M(12) M(13) M(14) M(15)
	__asm__ volatile(SIXTEEN(LOAD) "1:\tdec %0\n\tjnz 1b\n\t" SIXTEEN(STORE) "vzeroupper"
			 : "+r"(turns)
			 : "r"(&in), "r"(&out)
			 : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
			   "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
}

__attribute__((noinline, target("avx512f,avx512bw"))) static void spin_avx512(uint64_t turns)
{
#define LOADZ(n) "vmovdqa64 " #n "*64(%1), %%zmm" #n "\n\t"
#define STOREZ(n) "vmovdqa64 %%zmm" #n ", " #n "*64(%2)\n\t"
#define MORE(M) M(16) M(17) M(18) M(19) M(20) M(21) M(22) M(23) M(24) M(25) M(26) M(27) M(28) M(29) M(30) M(31)
#define LOADK(n) "kmovq 2048+" #n "*8(%1), %%k" #n "\n\t"
#define STOREK(n) "kmovq %%k" #n ", 2048+" #n "*8(%2)\n\t"
#define EIGHT(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7)
	__asm__ volatile(SIXTEEN(LOADZ) MORE(LOADZ) EIGHT(LOADK) "1:\tdec %0\n\tjnz 1b\n\t" SIXTEEN(STOREZ)
				 MORE(STOREZ) EIGHT(STOREK) "vzeroupper"
			 : "+r"(turns)
			 : "r"(&in), "r"(&out)
			 : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
			   "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18",
			   "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28",
			   "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", "k7");
}

int main(void)
{
	unsigned a, b = 0, c = 0, d, low = 0, high;
	__get_cpuid(1, &a, &b, &c, &d);
	if (c & bit_OSXSAVE)
		__asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
	__get_cpuid_count(7, 0, &a, &b, &c, &d);
	bool avx2 = b & bit_AVX2 && (low & 6) == 6;
	bool avx512 = b & bit_AVX512F && b & bit_AVX512BW && (low & 0xe6) == 0xe6;
	say("avx2 %s, avx512 %s\n", avx2 ? "checked" : "absent", avx512 ? "checked" : "absent");
	uint64_t random = 3;
	do {
		for (size_t i = 0; i < sizeof in; i++)
			((unsigned char *)&in)[i] = (unsigned char)next_random(&random);
		if (avx2) {
			memset(&out, 0, sizeof out);
			spin_avx2(15000000);
			for (int i = 0; i < 16; i++)
				CHECK(memcmp(out.at[i], in.at[i], 32) == 0);
		}
		if (avx512) {
			memset(&out, 0, sizeof out);
			spin_avx512(15000000);
			CHECK(memcmp(&out, &in, sizeof in) == 0);
		}
	} while (going());
	return pass();
}
