/* Proves: threads wait in calls of all kinds at the same time, independently: a pipe, a poll with
 * and without a timeout, a sleep, a condition with a timeout; no wake-up is lost, repeated or
 * delivered to another thread. */
#include "program.h"
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

static _Atomic bool over;
static int to_reader[2], to_poller[2], answers[2];

static void *reads(void *argument)
{
	for (char byte = 0, wanted = 0;; wanted++) {
		CHECK_IS(read(to_reader[0], &byte, 1), 1);
		if (over)
			return argument;
		CHECK_IS(byte, wanted);
		CHECK_IS(write(answers[1], &byte, 1), 1);
	}
}

static void *polls(void *argument)
{
	for (char byte;;) {
		struct pollfd waits = { .fd = to_poller[0], .events = POLLIN };
		CHECK_IS(poll(&waits, 1, -1), 1);
		CHECK_IS(read(to_poller[0], &byte, 1), 1);
		if (over)
			return argument;
		CHECK_IS(write(answers[1], &byte, 1), 1);
	}
}

static void *sleeps(void *argument)
{
	while (!over) {
		double begun = now();
		struct timespec time = { 0, 30000000 };
		CHECK_IS(nanosleep(&time, NULL), 0);
		CHECK(now() - begun >= 0.0299);
		struct pollfd none = { .fd = -1 };
		begun = now();
		CHECK_IS(poll(&none, 1, 20), 0);
		CHECK(now() - begun >= 0.0199);
	}
	return argument;
}

static void *times_out(void *argument)
{
	pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	pthread_cond_t never = PTHREAD_COND_INITIALIZER;
	while (!over) {
		struct timespec until;
		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_nsec += 20000000;
		if (until.tv_nsec >= 1000000000)
			until.tv_sec++, until.tv_nsec -= 1000000000;
		pthread_mutex_lock(&lock);
		CHECK_IS(pthread_cond_timedwait(&never, &lock, &until), ETIMEDOUT);
		pthread_mutex_unlock(&lock);
	}
	return argument;
}

int main(void)
{
	void *(*kinds[])(void *) = { reads, polls, sleeps, times_out };
	pthread_t threads[4];
	CHECK_IS(pipe(to_reader), 0);
	CHECK_IS(pipe(to_poller), 0);
	CHECK_IS(pipe(answers), 0);
	for (int i = 0; i < 4; i++)
		CHECK_IS(pthread_create(&threads[i], NULL, kinds[i], NULL), 0);
	for (char byte = 0, back; byte == 0 || going(); byte++) {
		CHECK_IS(write(to_reader[1], &byte, 1), 1);
		CHECK_IS(read(answers[0], &back, 1), 1);
		CHECK_IS(back, byte);
		char other = (char)~byte;
		CHECK_IS(write(to_poller[1], &other, 1), 1);
		CHECK_IS(read(answers[0], &back, 1), 1);
		CHECK_IS(back, other);
		rest_ms(1);
	}
	over = true;
	CHECK_IS(write(to_reader[1], "", 1), 1);
	CHECK_IS(write(to_poller[1], "", 1), 1);
	for (int i = 0; i < 4; i++)
		CHECK_IS(pthread_join(threads[i], NULL), 0);
	return pass();
}
