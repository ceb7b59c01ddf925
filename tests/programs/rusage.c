/* Proves: the usage reported when a child is waited for includes all that it used, wherever it ran,
 * and that of the children it has waited for; by wait4, waitid, RUSAGE_CHILDREN and times, which
 * agree. Children that were not waited for do not count.
 *
 * One exception: a parent that has come home by itself when its child ends gets only home's part
 * (docs/reference/limits.md). It can detect that it is away by its own CPU time, which is then more
 * than home's kernel counts. It may have been home for a moment in between, but not each time. */
#include "program.h"
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/times.h>

/* Ticks: one at home and one away, each for user and system time. All else is exact to the
 * microsecond. */
static const double ticking = 0.04, slack = 0.0001;

enum { MISSES = 5 };

static double seconds(struct timeval t) { return (double)t.tv_sec + (double)t.tv_usec / 1e6; }
static double sum(const struct rusage *u) { return seconds(u->ru_utime) + seconds(u->ru_stime); }

static double own(void)
{
	struct timespec t;
	CHECK_IS(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t), 0);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* The margin is for `of_home`, which counts user and system time in ticks. */
static bool away(void) { return own() > of_home() + 0.03; }

static double children(void)
{
	struct rusage u;
	CHECK_IS(getrusage(RUSAGE_CHILDREN, &u), 0);
	return sum(&u);
}

static double children_by_times(void)
{
	struct tms t;
	CHECK(times(&t) != (clock_t)-1);
	return (double)(t.tms_cutime + t.tms_cstime) / (double)sysconf(_SC_CLK_TCK);
}

static void compute(void)
{
	static volatile uint64_t work;
	/* More than 4 ms on any processor. */
	for (int i = 0; i < 40 * 1000 * 1000; i++)
		work += (uint64_t)i;
}

/* A child that computes, has a computing child itself, and reports the usage of both. */
static pid_t begin(int out)
{
	pid_t child = fork();
	CHECK(child >= 0);
	if (child)
		return child;
	int told[2];
	double below = 0;
	CHECK_IS(pipe(told), 0);
	pid_t grandchild = fork();
	CHECK(grandchild >= 0);
	for (int i = 0; i < 3; i++)
		compute();
	double used = own();
	if (grandchild == 0) {
		CHECK_IS(write(told[1], &used, sizeof used), sizeof used);
		_exit(4);
	}
	await_exit(grandchild, 4);
	CHECK_IS(read(told[0], &below, sizeof below), sizeof below);
	/* The grandchild may have been waited for at home. */
	double counted = children();
	used = own() + (counted < below ? counted : below);
	CHECK_IS(write(out, &used, sizeof used), sizeof used);
	_exit(3);
}

/* Waits in one of several ways; returns the reported usage, or a negative value. */
static double await(pid_t child, int way)
{
	struct rusage u;
	siginfo_t info;
	int status = 0;
	memset(&u, 0x55, sizeof u);
	memset(&info, 0x55, sizeof info);
	switch (way) {
	case 0:
		CHECK_IS(wait4(child, &status, 0, &u), child);
		CHECK_IS(WEXITSTATUS(status), 3);
		return sum(&u);
	case 1:
		CHECK_IS(wait4(-1, NULL, 0, &u), child);
		return sum(&u);
	case 2:
		/* Peeked at first, with WNOWAIT. */
		CHECK_IS(syscall(SYS_waitid, P_PID, child, &info, WEXITED | WNOWAIT, &u), 0);
		CHECK_IS(info.si_pid, child);
		CHECK_IS(wait4(child, &status, WNOHANG, NULL), child);
		return sum(&u);
	case 3:
		CHECK_IS(syscall(SYS_waitid, P_ALL, 0, &info, WEXITED, &u), 0);
		CHECK_IS(info.si_pid, child);
		CHECK_IS(info.si_status, 3);
		return sum(&u);
	case 4:
		CHECK_IS(syscall(SYS_waitid, P_PID, child, NULL, WEXITED, &u), 0);
		return sum(&u);
	default:
		await_exit(child, 3);
		return -1;
	}
}

enum { WAYS = 6 };

static void discarded(void)
{
	struct sigaction discard = { .sa_handler = SIG_DFL, .sa_flags = SA_NOCLDWAIT }, before;
	CHECK_IS(sigaction(SIGCHLD, &discard, &before), 0);
	bool was_away = away();
	double had = children();
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		for (int i = 0; i < 4; i++)
			compute();
		_exit(0);
	}
	CHECK_IS(waitpid(child, NULL, 0), -1);
	CHECK_IS(errno, ECHILD);
	double has = children();
	if (was_away && away() && has > had + 0.03)
		fail("FAIL: a child that was discarded counts: %f before, %f then\n", had, has);
	CHECK_IS(sigaction(SIGCHLD, &before, NULL), 0);
}

/* One child, waited for in the way whose turn it is; after a miss the same way is tried again.
 * Returns whether the result could be checked. */
static bool judged(const int *out)
{
	static int misses, round;
	compute();
	bool was_away = away();
	double had = children(), told;
	pid_t child = begin(out[1]);
	int way = round % WAYS;
	double got = await(child, way);
	CHECK_IS(read(out[0], &told, sizeof told), sizeof told);
	double has = children(), ticks = children_by_times();
	if (!was_away || !away()) {
		misses = 0, round++;
		return false;
	}
	bool miss = (got >= 0 && got < told - slack) || has < had + told - slack || ticks < has - ticking ||
		    ticks > has + ticking;
	misses = miss ? misses + 1 : 0;
	round += !miss;
	if (misses == MISSES)
		fail("FAIL: way %d: %f used, %f told; children %f before, %f then, %f in ticks\n", way, told, got, had,
		     has, ticks);
	return true;
}

int main(void)
{
	int out[2], rounds = 0;
	CHECK_IS(pipe(out), 0);
	do {
		judged(out);
		if (rounds++ % 4 == 3)
			discarded();
	} while (going());
	/* If the child ends away, the process stays there until the check. */
	for (int i = 0; i < 10; i++)
		compute();
	for (int i = 0; i < MISSES && judged(out); i++)
		;
	return pass();
}
