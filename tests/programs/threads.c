/* Proves: threads move with their process: mutexes and conditions, thread-local memory, own ids,
 * names and CPU clocks. */
#include "program.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/syscall.h>

enum { THREADS = 4 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turned = PTHREAD_COND_INITIALIZER;
static uint64_t guarded, turn;
static _Atomic bool over;
static __thread uint64_t own;

struct worker {
	pthread_t thread;
	pid_t tid;
	uint64_t count;
	int number;
};

static double used(void)
{
	struct timespec t;
	CHECK_IS(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t), 0);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void *work(void *argument)
{
	struct worker *me = argument;
	char name[16], told[16];
	snprintf(name, sizeof name, "worker %d", me->number);
	CHECK_IS(pthread_setname_np(pthread_self(), name), 0);
	me->tid = (pid_t)syscall(SYS_gettid);
	uint64_t state = (uint64_t)me->number;
	while (!over) {
		/* Each thread in turn, and between turns some arithmetic that must have the same
		 * result twice. */
		pthread_mutex_lock(&lock);
		while (turn % THREADS != (uint64_t)me->number && !over)
			pthread_cond_wait(&turned, &lock);
		guarded++;
		turn++;
		pthread_cond_broadcast(&turned);
		pthread_mutex_unlock(&lock);
		me->count++;
		own++;
		uint64_t again = state, first = 0, second = 0;
		for (int i = 0; i < 20000; i++)
			first ^= next_random(&state);
		for (int i = 0; i < 20000; i++)
			second ^= next_random(&again);
		CHECK(first == second);
		CHECK(own == me->count);
		if (me->count % 64 == 0) {
			CHECK_IS(syscall(SYS_gettid), me->tid);
			CHECK_IS(pthread_getname_np(pthread_self(), told, sizeof told), 0);
			CHECK(strcmp(told, name) == 0);
			CHECK(used() > 0);
		}
	}
	return me;
}

int main(void)
{
	struct worker workers[THREADS] = { 0 };
	for (int i = 0; i < THREADS; i++) {
		workers[i].number = i;
		CHECK_IS(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
	}
	for (bool all = false; !all || going(); rest_ms(10)) {
		pthread_mutex_lock(&lock);
		all = turn > THREADS;
		pthread_mutex_unlock(&lock);
	}
	over = true;
	pthread_mutex_lock(&lock);
	pthread_cond_broadcast(&turned);
	pthread_mutex_unlock(&lock);
	uint64_t sum = 0;
	for (int i = 0; i < THREADS; i++) {
		void *result;
		CHECK_IS(pthread_join(workers[i].thread, &result), 0);
		CHECK(result == &workers[i] && workers[i].count > 0);
		CHECK(workers[i].tid != getpid());
		sum += workers[i].count;
	}
	CHECK(sum == guarded);
	return pass();
}
