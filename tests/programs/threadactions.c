/* Proves: when two threads set a signal's action at the same time, the same setting is the later
 * one for sigaction and for the delivery of the signal. */
#include "program.h"
#include <pthread.h>
#include <stdatomic.h>

static pthread_barrier_t together;
static _Atomic int seen;
static bool over;

static void note(int signal UNUSED)
{
	seen++;
}

static void set(void (*handler)(int))
{
	struct sigaction action = { .sa_handler = handler };
	CHECK_IS(sigaction(SIGUSR1, &action, NULL), 0);
}

static void *ignore_it(void *argument)
{
	for (;;) {
		pthread_barrier_wait(&together);
		if (over)
			return argument;
		set(SIG_IGN);
		pthread_barrier_wait(&together);
	}
}

int main(void)
{
	pthread_t other;
	struct sigaction now;
	CHECK_IS(pthread_barrier_init(&together, NULL, 2), 0);
	CHECK_IS(pthread_create(&other, NULL, ignore_it, NULL), 0);
	while (going()) {
		pthread_barrier_wait(&together);
		set(note);
		pthread_barrier_wait(&together);
		CHECK_IS(sigaction(SIGUSR1, NULL, &now), 0);
		seen = 0;
		CHECK_IS(pthread_kill(pthread_self(), SIGUSR1), 0);
		CHECK_IS(seen, now.sa_handler == note);
	}
	over = true;
	pthread_barrier_wait(&together);
	CHECK_IS(pthread_join(other, NULL), 0);
	return pass();
}
