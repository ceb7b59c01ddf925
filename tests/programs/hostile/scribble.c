/* Tries: to confuse the shim by writing over the writable part of the stub's range between its
 * calls. It must not even harm itself: no state is kept there while it runs. */
#include "hostile.h"
#include <setjmp.h>

static volatile sig_atomic_t caught;

static void catch(int signal)
{
	(void)signal;
	caught++;
}

static sigjmp_buf before;

static void fault(int signal)
{
	siglongjmp(before, signal);
}

/* It may have come home between the check and the write. */
static void scribble(uintptr_t page, size_t word, uint64_t value)
{
	if (!mapped(page)) /* it is not mapped at home */
		return;
	if (sigsetjmp(before, 1) == 0)
		((volatile uint64_t *)page)[word] = value;
	else
		CHECK(!mapped(page));
}

int main(int argc, char **argv)
{
	CHECK(argc >= 2);
	signal(SIGUSR1, catch);
	signal(SIGSEGV, fault);
	ready();
	uintptr_t range = find_range(argv[1]);
	fcntl(0, F_SETFL, O_NONBLOCK);
	say("done\n");
	char line[16];
	int parent = getppid();
	uint64_t random = 3;
	for (int turn = 0; read(0, line, sizeof line) < 0 && errno == EAGAIN; turn++) {
		for (uintptr_t page = range + PAGE; page < range + RANGE; page += PAGE)
			scribble(page, next_random(&random) % 512, next_random(&random) << turn % 48);
		CHECK_IS(getppid(), parent);
		raise(SIGUSR1);
		CHECK_IS(caught, turn + 1);
		if (turn % 5 == 0) {
			pid_t child = fork();
			CHECK(child >= 0);
			if (child == 0)
				_exit(turn & 63);
			await_exit(child, turn & 63);
		}
	}
	return pass();
}
