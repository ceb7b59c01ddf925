/* Settings of a process: limits, prctl, priorities. */
#ifndef RANDOMCALLS_LIMITS_H
#define RANDOMCALLS_LIMITS_H

#include "processes.h"

static void op_limit(void)
{
	long which = PICK(RLIMIT_FSIZE, RLIMIT_NOFILE, RLIMIT_CORE, RLIMIT_STACK, 99), result;
	struct rlimit64 set = { 0 }, old = { 0 };
	result = CALL(prlimit64, 0, which, NULL, &old);
	if (which == RLIMIT_FSIZE || which == RLIMIT_CORE) {
		set.rlim_max = old.rlim_max;
		set.rlim_cur = (uint64_t)PICK(0, 100, 5000, 60000, -1, -1, -1);
		/* The log is a file as well: this limit holds for few calls. */
		note("prlimit(%ld %lld) = %s old %lld", which, (long long)set.rlim_cur, shown(CALL(prlimit64, 0, which, &set, NULL)), (long long)old.rlim_cur);
		if (which == RLIMIT_FSIZE) {
			op_write(), op_write(), op_resize(), op_copy();
			CALL(prlimit64, 0, which, &old, NULL);
		}
		return;
	}
	if (which == RLIMIT_NOFILE) {
		struct rlimit64 few = { (uint64_t)PICK(3, 8, 12, 20), old.rlim_max };
		CALL(prlimit64, 0, which, &few, NULL);
		/* A name that is missing is another error then (limits.md). */
		long directory = CALL(openat, AT_FDCWD, ".", O_RDONLY | O_DIRECTORY);
		note("openat . = %s", shown(directory));
		if (directory >= 0)
			opened((int)directory, DIRECTORY);
		op_descriptor(), op_pipe(), op_event();
		CALL(prlimit64, 0, which, &old, NULL);
		note("nofile %llu", (unsigned long long)few.rlim_cur);
		return;
	}
	note("prlimit(%ld) = %s", which, shown(result));
}

static void op_prctl(void)
{
	char name[32] = "";
	int value = 0;
	long argument = PICK(0, 1, 2, 77), result;
	switch (draw(8)) {
	case 0:
		note("set name = %s", shown(CALL(prctl, PR_SET_NAME, argument ? "randomcalls-name" : "r")));
		break;
	case 1:
		result = CALL(prctl, PR_GET_NAME, name);
		note("name = %s %s", shown(result), name);
		break;
	case 2:
		note("pdeathsig = %s", shown(CALL(prctl, PR_SET_PDEATHSIG, PICK(0, SIGUSR1, 65))));
		break;
	case 3:
		result = CALL(prctl, PR_GET_PDEATHSIG, &value);
		note("pdeathsig = %s %d", shown(result), value);
		break;
	case 4:
		note("subreaper %ld = %s", argument, shown(CALL(prctl, PR_SET_CHILD_SUBREAPER, argument)));
		break;
	case 5:
		note("timerslack = %s", shown(CALL(prctl, PR_GET_TIMERSLACK)));
		break;
	case 6:
		note("no_new_privs = %s %s", shown(CALL(prctl, PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)), shown(CALL(prctl, PR_SET_NO_NEW_PRIVS, argument, 0, 0, 0)));
		break;
	default:
		note("keepcaps = %s %s", shown(CALL(prctl, PR_SET_KEEPCAPS, argument, 0, 0, 0)), shown(CALL(prctl, PR_GET_KEEPCAPS, 0, 0, 0, 0)));
	}
}

static void op_priority(void)
{
	unsigned long cpus[16] = { 0 };
	struct sched_param parameters = { 0 };
	long value = PICK(0, 1, 5, 100), result;
	switch (draw(5)) {
	case 0:
		note("getpriority = %s", shown(CALL(getpriority, PRIO_PROCESS, PICK(0, 0, 999999999))));
		break;
	case 1:
		/* It could not go back if it were a plain user's: children do it. */
		if (me.depth)
			note("setpriority(%ld) = %s", value, shown(CALL(setpriority, PRIO_PROCESS, 0, value)));
		break;
	case 2:
		result = CALL(sched_getaffinity, 0, sizeof cpus, one_in(10) ? NULL : cpus);
		note("affinity = %s", result > 0 ? "some" : shown(result));
		break;
	case 3:
		note("scheduler = %s %s", shown(CALL(sched_getscheduler, 0)), shown(CALL(sched_getparam, 0, &parameters)));
		break;
	default:
		note("ioprio = %s", shown(CALL(ioprio_get, 1, PICK(0, 999999999))));
	}
}

#endif
