/* Tries: a 32-bit call, which the system call table does not cover. */
#include "hostile.h"

int main(void)
{
	ready();
	long ret = 64; /* getppid */
	__asm__ volatile("int $0x80" : "+a"(ret)::"memory");
	say("it came back with %ld\n", ret);
	done();
	return pass();
}
