/* How the timed programs report: one line for each batch, with the nanoseconds per round. The clock
 * is read by the vDSO, so that reading it is no forwarded call.
 */
#ifndef TERN_STOPWATCH_H
#define TERN_STOPWATCH_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* Approximate duration of a batch in seconds. */
#define BATCH 0.2

static inline double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static inline void say_pid(void)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	printf("pid %d\n", (int)getpid());
}

/* Calls once(arg) until the time is over (0: for ever), and prints each batch's nanoseconds per
 * call. */
static inline void batches(double seconds, void (*once)(int), int arg)
{
	double begun = now(), end = begun + seconds;
	while (seconds == 0 || begun < end) {
		double from = begun;
		long rounds = 0;
		do {
			for (int i = 0; i < 64; i++)
				once(arg);
			rounds += 64;
			begun = now();
		} while (begun < from + BATCH);
		printf("%.1f\n", (begun - from) / (double)rounds * 1e9);
	}
}
#endif
