/* Proves: a program's membarrier registrations remain in force after a move. */
#include "program.h"
#include <sys/syscall.h>

/* from linux/membarrier.h, which musl lacks */
enum { PRIVATE_EXPEDITED = 1 << 3, REGISTER_PRIVATE_EXPEDITED = 1 << 4 };

int main(void)
{
	CHECK_IS(syscall(SYS_membarrier, PRIVATE_EXPEDITED, 0, 0), -1);
	CHECK_IS(errno, EPERM);
	CHECK_IS(syscall(SYS_membarrier, REGISTER_PRIVATE_EXPEDITED, 0, 0), 0);
	do {
		CHECK_IS(syscall(SYS_membarrier, PRIVATE_EXPEDITED, 0, 0), 0);
		rest_ms(1);
	} while (going());
	return pass();
}
