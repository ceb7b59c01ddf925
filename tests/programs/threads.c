/* Proves: a program with threads is not moved yet, and goes on undisturbed by the attempt. */
#include "program.h"
#include <pthread.h>
#include <stdatomic.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t guarded;
static _Atomic bool over;

static void *work(void *count)
{
	while (!over) {
		pthread_mutex_lock(&lock);
		guarded++;
		++*(uint64_t *)count;
		pthread_mutex_unlock(&lock);
	}
	return count;
}

int main(void)
{
	pthread_t threads[3];
	uint64_t counts[3] = { 0, 0, 0 }, sum = 0;
	for (int i = 0; i < 3; i++)
		CHECK_IS(pthread_create(&threads[i], NULL, work, &counts[i]), 0);
	for (;;) {
		pthread_mutex_lock(&lock);
		bool all = counts[0] && counts[1] && counts[2];
		pthread_mutex_unlock(&lock);
		if (all && !going())
			break;
		rest_ms(10);
	}
	over = true;
	for (int i = 0; i < 3; i++) {
		void *result;
		CHECK_IS(pthread_join(threads[i], &result), 0);
		CHECK(result == &counts[i] && counts[i] > 0);
		sum += counts[i];
	}
	CHECK(sum == guarded);
	return pass();
}
