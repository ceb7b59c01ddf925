/* Proves: a program that shares writable memory with a process that cannot move is not moved,
 * and continues undisturbed. */
#include "program.h"
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>

/* Waits until the child has counted further, for at most ten seconds. */
static uint32_t await_more(_Atomic uint32_t *count, uint32_t than)
{
	for (int i = 0; i < 100 && *count <= than; i++)
		rest_ms(100);
	CHECK(*count > than);
	return *count;
}

int main(void)
{
	_Atomic uint32_t *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(shared != MAP_FAILED);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		/* A seccomp filter of its own, which allows everything, keeps it home. */
		struct {
			uint16_t code;
			uint8_t if_true, if_false;
			uint32_t value;
		} allow = {0x06, 0, 0, 0x7fff0000};
		struct {
			uint16_t length;
			void *first;
		} filter = {1, &allow};
		CHECK_IS(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
		CHECK_IS(prctl(PR_SET_SECCOMP, 2, &filter), 0);
		while (!shared[1]) {
			shared[0]++;
			rest_ms(2);
		}
		_exit(0);
	}
	uint32_t last = await_more(shared, 0); /* it counts under its filter */
	say("held\n");
	do
		last = await_more(shared, last);
	while (going());
	shared[1] = 1;
	await_exit(child, 0);
	return pass();
}
