/* Proves: CPU time, by four calls that agree, grows by what the program uses wherever it runs, and
 * never goes back, with one exception: when the program has come home by itself, home reports only
 * home's part of the CPU time (docs/reference/limits.md). */
#include "program.h"
#include <sys/resource.h>
#include <sys/times.h>

/* A tick each for user and system time, and the cost of a journey for the process. */
static const double slack = 0.1;

static double process_clock(void)
{
	struct timespec t;
	CHECK_IS(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t), 0);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double thread_clock(void)
{
	struct timespec t;
	CHECK_IS(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t), 0);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double seconds(struct timeval t) { return (double)t.tv_sec + (double)t.tv_usec / 1e6; }

static double ticks(void)
{
	struct tms t;
	CHECK(times(&t) != (clock_t)-1);
	CHECK_IS(t.tms_cutime, 0);
	CHECK_IS(t.tms_cstime, 0);
	return (double)(t.tms_utime + t.tms_stime) / (double)sysconf(_SC_CLK_TCK);
}

static double usage(void)
{
	static double user, system;
	struct rusage u;
	CHECK_IS(getrusage(RUSAGE_SELF, &u), 0);
	double now_user = seconds(u.ru_utime), now_system = seconds(u.ru_stime);
	/* When the process is home again, a part goes back. The sum need not, because it includes
	 * the CPU time that was used since then. */
	if (now_user < user || now_system < system)
		CHECK(now_user + now_system <= of_home() + slack);
	user = now_user, system = now_system;
	return user + system;
}

int main(void)
{
	static double (*const ways[])(void) = { process_clock, thread_clock, usage, ticks };
	enum { WAYS = sizeof ways / sizeof *ways };
	double last[WAYS] = { 0 };
	volatile uint64_t work = 0;
	do {
		double got[WAYS];
		bool home = false;
		for (int i = 0; i < WAYS; i++) {
			got[i] = ways[i]();
			if (got[i] < last[i]) {
				home = true;
				double natively = of_home();
				if (got[i] > natively + slack)
					fail("FAIL: way %d went back from %f to %f, home says %f\n", i, last[i], got[i],
					     natively);
			}
		}
		for (int i = 1; i < WAYS && !home; i++) {
			double first = got[0], other = got[i];
			/* It may have come home between the two calls, or left again: but not
			 * each time. */
			for (int j = 0; j < 3 && (other < first - slack || other > first + slack); j++)
				first = ways[0](), other = ways[i]();
			if (other < first - slack || other > first + slack)
				fail("FAIL: way %d says %f, the first %f\n", i, other, first);
		}
		memcpy(last, got, sizeof last);
		double before = process_clock();
		/* Twenty million steps cost more than 2 ms on any processor. */
		for (int i = 0; i < 20 * 1000 * 1000; i++)
			work += (uint64_t)i;
		double after = process_clock();
		if (after >= before ? after - before < 0.002 : after > of_home() + slack)
			fail("FAIL: %f s used, then %f s\n", before, after);
	} while (going());
	return pass();
}
