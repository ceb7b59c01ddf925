/* Proves: the child of a thread that forks has only that thread, while other threads of the
 * parent work on; posix_spawn by a thread. */
#include "program.h"
#include <pthread.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sys/syscall.h>

extern char **environ;
static _Atomic bool over;
static _Atomic uint64_t worked;

static void *work(void *argument)
{
	uint64_t state = 1;
	while (!over) {
		next_random(&state);
		worked++;
	}
	return argument;
}

static void *forks(void *argument)
{
	int rounds = 0;
	do {
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			/* Its only thread's id is its pid. */
			CHECK_IS(syscall(SYS_gettid), getpid());
			uint64_t before = worked;
			rest_ms(5);
			_exit(before == worked ? 7 : 8);
		}
		await_exit(child, 7);
		if (rounds++ % 8 == 0) {
			char *words[] = { "true", NULL };
			CHECK_IS(posix_spawnp(&child, "true", NULL, NULL, words, environ), 0);
			await_exit(child, 0);
		}
	} while (going());
	return argument;
}

int main(void)
{
	pthread_t worker, forker;
	CHECK_IS(pthread_create(&worker, NULL, work, NULL), 0);
	while (!worked)
		rest_ms(1);
	CHECK_IS(pthread_create(&forker, NULL, forks, NULL), 0);
	CHECK_IS(pthread_join(forker, NULL), 0);
	over = true;
	CHECK_IS(pthread_join(worker, NULL), 0);
	CHECK(worked > 0);
	return pass();
}
