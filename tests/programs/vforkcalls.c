/* Proves: a child in its parent's memory (vfork) makes calls that only home can make, while the
 * parent has another thread and shared memory: only the child comes home for them, and its parent
 * continues. */
#include "program.h"
#include <pthread.h>
#include <sys/mman.h>
#include <sys/personality.h>

static volatile int *shared;

static void *other(void *nothing)
{
	(void)nothing;
	for (;;) {
		++*shared;
		rest_ms(5);
	}
	return NULL;
}

/* The program that the child executes has the settings that the child made. */
static void another_personality(void)
{
	pid_t child = vfork();
	CHECK(child >= 0);
	if (child == 0) {
		personality(ADDR_NO_RANDOMIZE);
		execl("/bin/sh", "sh", "-c", "read -r p </proc/self/personality; [ $p = 00040000 ] && exit 5", NULL);
		_exit(127);
	}
	await_exit(child, 5);
	CHECK_IS(personality(0xffffffff), 0);
}

/* The child ends without executing a program. */
static void nothing_more(void)
{
	pid_t child = vfork();
	CHECK(child >= 0);
	if (child == 0) {
		personality(ADDR_NO_RANDOMIZE);
		_exit(6);
	}
	await_exit(child, 6);
}

int main(void)
{
	shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(shared != MAP_FAILED);
	pthread_t thread;
	CHECK_IS(pthread_create(&thread, NULL, other, NULL), 0);
	do {
		int before = *shared;
		another_personality();
		nothing_more();
		/* the other thread continues, and its writes are not undone */
		double late = now() + 20;
		while (*shared <= before && now() < late)
			rest_ms(5);
		CHECK(*shared > before);
	} while (going());
	return pass();
}
