/* Proves: every general register and the flags keep their values, also in the middle of a loop. */
#include "program.h"

/* Loads 14 registers with values made from `seed`, spins, and sums their values afterwards. */
static uint64_t spin(uint64_t seed, uint64_t turns)
{
	uint64_t sum;
	__asm__ volatile("push %%rbp\n\tpush %%rbx\n\t"
			 "mov %%rdi, %%rax\n\t"
			 "lea 1(%%rax), %%rbx\n\tlea 2(%%rax), %%rdx\n\tlea 3(%%rax), %%rdi\n\t"
			 "lea 5(%%rax), %%rbp\n\tlea 7(%%rax), %%r8\n\tlea 11(%%rax), %%r9\n\t"
			 "lea 13(%%rax), %%r10\n\tlea 17(%%rax), %%r11\n\tlea 19(%%rax), %%r12\n\t"
			 "lea 23(%%rax), %%r13\n\tlea 29(%%rax), %%r14\n\tlea 31(%%rax), %%r15\n\t"
			 "std\n\tstc\n"               /* direction and carry; dec and jnz leave carry alone */
			 "1:\tdec %%rsi\n\tjnz 1b\n\t"
			 "adc $0, %%rax\n\t"          /* the carry is still there */
			 "pushfq\n\tandq $0x400, (%%rsp)\n\tadd (%%rsp), %%rax\n\tadd $8, %%rsp\n\tcld\n\t"
			 "add %%rbx, %%rax\n\tadd %%rdx, %%rax\n\tadd %%rdi, %%rax\n\tadd %%rbp, %%rax\n\t"
			 "add %%r8, %%rax\n\tadd %%r9, %%rax\n\tadd %%r10, %%rax\n\tadd %%r11, %%rax\n\t"
			 "add %%r12, %%rax\n\tadd %%r13, %%rax\n\tadd %%r14, %%rax\n\tadd %%r15, %%rax\n\t"
			 "pop %%rbx\n\tpop %%rbp"
			 : "=a"(sum), "+D"(seed), "+S"(turns)
			 :
			 : "rdx", "rcx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc");
	return sum;
}

int main(void)
{
	uint64_t seed = 1;
	do {
		next_random(&seed);
		uint64_t wanted = seed * 13 + 1 + 2 + 3 + 5 + 7 + 11 + 13 + 17 + 19 + 23 + 29 + 31 + 1 + 0x400;
		CHECK(spin(seed, 20000000) == wanted);
	} while (going());
	return pass();
}
