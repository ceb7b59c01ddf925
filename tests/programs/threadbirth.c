/* Proves: threads start and end away: joined and detached ones, with their tid words cleared and
 * their robust mutexes released; and /proc shows their ids. */
#include "program.h"
#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/syscall.h>

static pthread_mutex_t robust;
static _Atomic int detached;

static void *look(void *argument)
{
	char path[64];
	pid_t tid = (pid_t)syscall(SYS_gettid);
	snprintf(path, sizeof path, "/proc/self/task/%d", tid);
	CHECK_IS(access(path, F_OK), 0);
	CHECK(tid != getpid());
	return argument;
}

static void *die_with_it(void *argument)
{
	CHECK_IS(pthread_mutex_lock(&robust), 0);
	return argument;
}

static void *by_itself(void *argument)
{
	detached--;
	return argument;
}

int main(void)
{
	pthread_mutexattr_t kind;
	pthread_attr_t loose;
	CHECK_IS(pthread_mutexattr_init(&kind), 0);
	CHECK_IS(pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST), 0);
	CHECK_IS(pthread_attr_init(&loose), 0);
	CHECK_IS(pthread_attr_setdetachstate(&loose, PTHREAD_CREATE_DETACHED), 0);
	do {
		pthread_t threads[3], thread;
		for (intptr_t i = 0; i < 3; i++)
			CHECK_IS(pthread_create(&threads[i], NULL, look, (void *)i), 0);
		for (intptr_t i = 0; i < 3; i++) {
			void *result;
			CHECK_IS(pthread_join(threads[i], &result), 0);
			CHECK((intptr_t)result == i);
		}
		CHECK_IS(pthread_mutex_init(&robust, &kind), 0);
		CHECK_IS(pthread_create(&thread, NULL, die_with_it, NULL), 0);
		CHECK_IS(pthread_join(thread, NULL), 0);
		CHECK_IS(pthread_mutex_lock(&robust), EOWNERDEAD);
		CHECK_IS(pthread_mutex_consistent(&robust), 0);
		CHECK_IS(pthread_mutex_unlock(&robust), 0);
		CHECK_IS(pthread_mutex_destroy(&robust), 0);
		detached = 2;
		for (int i = 0; i < 2; i++)
			CHECK_IS(pthread_create(&thread, &loose, by_itself, NULL), 0);
		while (detached > 0)
			rest_ms(1);
	} while (going());
	return pass();
}
