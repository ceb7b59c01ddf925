/* Proves: monotonic and boot clocks, by vDSO and by system call, never go back, agree with each
 * other, and jump by no more than a move lasts; the wall clock stays within a second of them;
 * getcpu and time work.
 *
 *   TERN_RAW=no   leave out CLOCK_MONOTONIC_RAW: it cannot continue on another machine, as its offset in a time
 *                 namespace is that of CLOCK_MONOTONIC
 */
#include "program.h"
#include <sched.h>
#include <sys/syscall.h>
#include <sys/time.h>

static double seconds(struct timespec t) { return (double)t.tv_sec + (double)t.tv_nsec / 1e9; }

int main(void)
{
	static const clockid_t clocks[] = { CLOCK_MONOTONIC, CLOCK_BOOTTIME, CLOCK_MONOTONIC_COARSE,
					    CLOCK_MONOTONIC_RAW };
	enum { CLOCKS = sizeof clocks / sizeof *clocks };
	struct timespec t;
	double last[CLOCKS] = { 0 }, begun = now();
	int looked_at = getenv("TERN_RAW") ? CLOCKS - 1 : CLOCKS;
	CHECK_IS(clock_gettime(CLOCK_REALTIME, &t), 0);
	double wall = seconds(t), settled = now();
	do {
		for (int turn = 0; turn < 2000; turn++) {
			for (int i = 0; i < looked_at; i++) {
				if (turn % 2 == 0)
					CHECK_IS(clock_gettime(clocks[i], &t), 0);
				else
					CHECK_IS(syscall(SYS_clock_gettime, clocks[i], &t), 0);
				CHECK(t.tv_nsec >= 0 && t.tv_nsec < 1000000000);
				CHECK(seconds(t) >= last[i]);
				CHECK(last[i] == 0 || seconds(t) < last[i] + 10);
				last[i] = seconds(t);
			}
			unsigned cpu = 99999;
			CHECK_IS(syscall(SYS_getcpu, &cpu, NULL, NULL), 0);
			CHECK(cpu < 4096);
			CHECK(sched_getcpu() >= 0);
		}
		/* vDSO and system call in turn, in both orders */
		double by_vdso = now(), by_call;
		syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &t);
		by_call = seconds(t);
		CHECK(by_call >= by_vdso && now() >= by_call);
		/* a delay between the two readings */
		struct timeval day;
		double least = now() - settled;
		gettimeofday(&day, NULL);
		double most = now() - begun;
		double wall_passed = (double)day.tv_sec + (double)day.tv_usec / 1e6 - wall;
		CHECK(wall_passed > least - 1 && wall_passed < most + 1);
		CHECK(time(NULL) >= day.tv_sec - 1 && time(NULL) <= day.tv_sec + 3);
	} while (going());
	return pass();
}
