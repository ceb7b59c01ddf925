/* Proves: settings of a process and its threads stay set, and are reported as they were set: prctl,
 * limits of its own and of a child, nice, scheduler, CPUs, I/O priority, umask, personality,
 * directories, session and group. */
#include "program.h"
#include <sched.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/utsname.h>

/* musl lacks these for a process */
#define sched_setscheduler(pid, policy, param) syscall(SYS_sched_setscheduler, pid, policy, param)
#define sched_getscheduler(pid) syscall(SYS_sched_getscheduler, pid)
#define sched_getparam(pid, param) syscall(SYS_sched_getparam, pid, param)

int main(void)
{
	char text[64];
	int got;
	struct rlimit limit, other;
	cpu_set_t all, one, seen;
	CHECK_IS(sched_getaffinity(0, sizeof all, &all), 0);
	CHECK(CPU_COUNT(&all) > 0);
	int first = 0;
	while (!CPU_ISSET(first, &all))
		first++;
	CHECK_IS(prctl(PR_SET_PDEATHSIG, SIGTERM), 0);
	CHECK_IS(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
	CHECK_IS(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
	CHECK_IS(prctl(PR_SET_NAME, "a long name that is cut"), 0);
	CHECK_IS(prctl(PR_SET_TIMERSLACK, 123456), 0);
	CHECK_IS(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0), 0);
	CHECK_IS(setpriority(PRIO_PROCESS, 0, 7), 0);
	CHECK_IS(syscall(SYS_ioprio_set, 1, 0, 2 << 13 | 6), 0);
	struct sched_param none = { 0 };
	CHECK_IS(sched_setscheduler(0, SCHED_BATCH, &none), 0);
	limit = (struct rlimit){ 5000, 6000 };
	CHECK_IS(setrlimit(RLIMIT_SIGPENDING, &limit), 0);
	struct rlimit data = { 1 << 30, RLIM_INFINITY };
	CHECK_IS(setrlimit(RLIMIT_DATA, &data), 0);
	umask(031);
	CHECK_IS(chdir("/usr/lib"), 0);
	int root = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC), usr = open("/usr", O_PATH | O_CLOEXEC);
	CHECK(root >= 0 && usr >= 0);
	do {
		CHECK(prctl(PR_GET_PDEATHSIG, &got) == 0 && got == SIGTERM);
		CHECK(prctl(PR_GET_CHILD_SUBREAPER, &got) == 0 && got == 1);
		CHECK_IS(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 1);
		CHECK(prctl(PR_GET_NAME, text) == 0 && strcmp(text, "a long name tha") == 0);
		CHECK_IS(prctl(PR_GET_TIMERSLACK), 123456);
		CHECK_IS(prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0), 1);
		CHECK_IS(prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0), 0);
		CHECK_IS(prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0), 0);
		CHECK_IS(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0), 0);
		CHECK_IS(prctl(PR_GET_DUMPABLE), 1);
		CHECK_IS(prctl(PR_SET_DUMPABLE, 0), 0);
		CHECK_IS(prctl(PR_GET_DUMPABLE), 0);
		CHECK_IS(prctl(PR_SET_DUMPABLE, 1), 0);
		CHECK_IS(prctl(PR_SET_DUMPABLE, 7), -1);
		CHECK_IS(errno, EINVAL);
		CHECK_IS(prctl(PR_SET_PDEATHSIG, 999), -1);
		CHECK_IS(errno, EINVAL);
		CHECK_IS(prctl(PR_GET_SECCOMP), 0);
		CHECK_IS(prctl(PR_GET_KEEPCAPS), 0);

		CHECK_IS(getpriority(PRIO_PROCESS, 0), 7);
		CHECK_IS(getpriority(PRIO_PROCESS, getpid()), 7);
		CHECK_IS(syscall(SYS_ioprio_get, 1, 0), 2 << 13 | 6);
		CHECK_IS(sched_getscheduler(0), SCHED_BATCH);
		CHECK(sched_getparam(0, &none) == 0 && none.sched_priority == 0);
		CHECK(sched_get_priority_max(SCHED_FIFO) == 99 && sched_get_priority_min(SCHED_FIFO) == 1);
		struct timespec slice;
		CHECK_IS(sched_rr_get_interval(0, &slice), 0);
		CHECK_IS(sched_setscheduler(0, 77, &none), -1);
		CHECK_IS(errno, EINVAL);
		/* bound to one CPU, and released again */
		CPU_ZERO(&one);
		CPU_SET(first, &one);
		CHECK_IS(sched_setaffinity(0, sizeof one, &one), 0);
		CHECK(sched_getaffinity(0, sizeof seen, &seen) == 0 && CPU_EQUAL(&seen, &one));
		CHECK_IS(sched_setaffinity(0, sizeof all, &all), 0);
		CHECK(sched_getaffinity(getpid(), sizeof seen, &seen) == 0 && CPU_EQUAL(&seen, &all));
		CPU_ZERO(&one);
		CHECK_IS(sched_setaffinity(0, sizeof one, &one), -1);
		CHECK_IS(errno, EINVAL);
		unsigned cpu = 99999, node = 99999;
		CHECK_IS(syscall(SYS_getcpu, &cpu, &node, NULL), 0);
		CHECK(cpu < 4096 && node < 1024 && sched_yield() == 0);

		CHECK(getrlimit(RLIMIT_SIGPENDING, &limit) == 0 && limit.rlim_cur == 5000 && limit.rlim_max == 6000);
		CHECK(getrlimit(RLIMIT_DATA, &limit) == 0 && limit.rlim_cur == 1 << 30);
		limit.rlim_cur = 5001, limit.rlim_max = 5000;
		CHECK_IS(setrlimit(RLIMIT_SIGPENDING, &limit), -1);
		CHECK_IS(errno, EINVAL);
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			CHECK(getpriority(PRIO_PROCESS, 0) == 7 && sched_getscheduler(0) == SCHED_BATCH);
			/* inherited or not, as in prctl(2) */
			CHECK(prctl(PR_GET_PDEATHSIG, &got) == 0 && got == 0);
			CHECK_IS(prctl(PR_GET_TIMERSLACK), 123456);
			CHECK_IS(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 1);
			CHECK_IS(prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0), 1);
			CHECK(setsid() == getpid() && getsid(0) == getpid() && getpgrp() == getpid());
			CHECK(setpgid(0, 0) < 0 && errno == EPERM);
			do
				CHECK_IS(getrlimit(RLIMIT_CORE, &limit), 0);
			while (limit.rlim_cur != 4711);
			_exit(6);
		}
		other = (struct rlimit){ 4711, 4711 };
		CHECK_IS(prlimit(child, RLIMIT_CORE, &other, &limit), 0);
		CHECK(prlimit(child, RLIMIT_CORE, NULL, &limit) == 0 && limit.rlim_max == 4711);
		await_exit(child, 6);

		CHECK_IS(umask(022), 031);
		CHECK_IS(umask(031), 022);
		CHECK_IS(personality(0xffffffff), PER_LINUX);
		CHECK(getcwd(text, sizeof text) != NULL && strcmp(text, "/usr/lib") == 0);
		CHECK_IS(fchdir(usr), 0);
		CHECK(getcwd(text, sizeof text) != NULL && strcmp(text, "/usr") == 0);
		CHECK_IS(fchdir(root), 0);
		CHECK(getcwd(text, sizeof text) != NULL && strcmp(text, "/") == 0);
		CHECK_IS(chdir("usr/nothing"), -1);
		CHECK_IS(errno, ENOENT);
		CHECK_IS(chdir("usr/lib"), 0);
		struct utsname about;
		CHECK(uname(&about) == 0 && strcmp(about.sysname, "Linux") == 0 && strcmp(about.machine, "x86_64") == 0);
		CHECK_IS(syscall(SYS_gettid), getpid());
	} while (going());
	return pass();
}
