/* Proves: thread-local variables (the FS base), including errno; a fork has its own copies. */
#include "program.h"

static _Thread_local uint64_t counter = 5;
static _Thread_local char area[8192];

int main(void)
{
	uint64_t wanted = 5;
	do {
		for (int i = 0; i < 100000; i++) {
			counter += (uint64_t)i;
			wanted += (uint64_t)i;
			area[i % 8192] = (char)i;
			CHECK_IS(area[i % 8192], (char)i);
		}
		CHECK(counter == wanted);
		CHECK_IS(close(-1), -1);
		CHECK_IS(errno, EBADF);
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			counter = 1;
			_exit(area[100] == (char)(100 + 8192 * 12 > 99999 ? 100 + 8192 * 11 : 100 + 8192 * 12) ? 0 : 1);
		}
		await_exit(child, 0);
		CHECK(counter == wanted);
	} while (going());
	return pass();
}
