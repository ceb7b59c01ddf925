/* The shortest call that is performed at home: getppid, in a loop, until it is killed. */
#include "stopwatch.h"
#include <sys/syscall.h>

static void once(int unused)
{
	(void)unused;
	syscall(SYS_getppid);
}

int main(void)
{
	say_pid();
	batches(0, once, 0);
}
