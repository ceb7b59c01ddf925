/* Proves: a hundred threads, or the number given, in step with each other, some of them in calls
 * and some not. */
#include "program.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/syscall.h>

enum { MOST = 4000 };

static pthread_barrier_t together;
static _Atomic uint64_t sum;
static bool over;

static void *step(void *argument)
{
	intptr_t number = (intptr_t)argument;
	for (;;) {
		pthread_barrier_wait(&together);
		if (over)
			return argument;
		if (number % 10 == 0)
			CHECK_IS(syscall(SYS_getppid), getppid());
		sum += (uint64_t)number;
		pthread_barrier_wait(&together);
	}
}

int main(int argc, char **argv)
{
	static pthread_t threads[MOST];
	const uint64_t count = argc > 1 ? (uint64_t)atoi(argv[1]) : 100;
	CHECK(count > 0 && count <= MOST);
	pthread_attr_t small;
	CHECK_IS(pthread_attr_init(&small), 0);
	CHECK_IS(pthread_attr_setstacksize(&small, 128 << 10), 0);
	CHECK_IS(pthread_barrier_init(&together, NULL, (unsigned)count + 1), 0);
	for (intptr_t i = 0; i < (intptr_t)count; i++)
		CHECK_IS(pthread_create(&threads[i], &small, step, (void *)i), 0);
	for (uint64_t rounds = 1; rounds == 1 || going(); rounds++) {
		pthread_barrier_wait(&together);
		pthread_barrier_wait(&together);
		CHECK(sum == rounds * count * (count - 1) / 2);
		rest_ms(1);
	}
	over = true;
	pthread_barrier_wait(&together);
	for (uint64_t i = 0; i < count; i++)
		CHECK_IS(pthread_join(threads[i], NULL), 0);
	return pass();
}
