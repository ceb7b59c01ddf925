/* Proves: shared memory without a file can be mapped, written and unmapped any number of times, while other such memory,
 * which a child has too, keeps its content. With a number as argument it does that so many times, prints a line, and
 * then only waits. */
#include "program.h"
#include <stdatomic.h>
#include <sys/mman.h>

enum { SIZE = 1 << 20 };

struct kept {
	_Atomic unsigned of_parent, of_child;
	_Atomic bool over;
};

static void *share(size_t length)
{
	void *at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(at != MAP_FAILED);
	return at;
}

static void use_once(void)
{
	char *memory = share(SIZE);
	for (int at = 0; at < SIZE; at += 4096)
		CHECK_IS(memory[at]++, 0);
	CHECK_IS(munmap(memory, SIZE), 0);
}

int main(int argc, char **argv)
{
	int times = argc > 1 ? atoi(argv[1]) : 0;
	unsigned rounds = 0;
	struct kept *kept = share(sizeof *kept);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		unsigned turns = 0;
		for (; !kept->over; turns++, rest_ms(2))
			CHECK_IS(kept->of_child++, turns);
		_exit(0);
	}
	for (int i = 0; i < times; i++)
		use_once();
	if (times)
		say("unmapped %d\n", times);
	while (going()) {
		if (times == 0)
			use_once();
		CHECK_IS(kept->of_parent++, rounds++);
		rest_ms(5);
	}
	kept->over = true;
	await_exit(child, 0);
	return pass();
}
