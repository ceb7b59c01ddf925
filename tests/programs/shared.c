/* Proves: a program that shares writable memory with its child is not moved yet, and goes on undisturbed. */
#include "program.h"
#include <stdatomic.h>
#include <sys/mman.h>

int main(void)
{
	_Atomic uint32_t *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(shared != MAP_FAILED);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		while (!shared[1]) {
			shared[0]++;
			rest_ms(2);
		}
		_exit(0);
	}
	uint32_t last = 0;
	do {
		rest_ms(100);
		CHECK(shared[0] > last);
		last = shared[0];
	} while (going());
	shared[1] = 1;
	await_exit(child, 0);
	return pass();
}
