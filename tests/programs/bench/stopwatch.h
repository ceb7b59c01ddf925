/* How the programs that are timed say what they measured: one line a batch, "NANOSECONDS\n" for each round. The
 * clock is read by the vDSO, so that also away it is no call to home.
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

/* How long a batch takes, about. */
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

/* Calls once(arg) over and over until the time is over (0: for ever), and says each batch's nanoseconds per call. */
static inline void batches(double seconds, void (*once)(int), int arg)
{
	double end = now() + seconds;
	for (long rounds = 16; seconds == 0 || now() < end;) {
		double begun = now();
		for (long i = 0; i < rounds; i++)
			once(arg);
		double took = now() - begun;
		/* A batch that was much shorter or longer than it should be only finds the number of rounds. */
		if (took > BATCH / 2 && took < BATCH * 2)
			printf("%.1f\n", took / (double)rounds * 1e9);
		else
			rounds = took < BATCH / 64 ? rounds * 64 : (long)((double)rounds * BATCH / took) + 1;
	}
}
#endif
