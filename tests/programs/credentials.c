/* Proves: ids, groups, session, limits and priority are those of home. */
#include "program.h"
#include <grp.h>
#include <sys/resource.h>

int main(void)
{
	pid_t pid = getpid(), parent = getppid(), group = getpgrp(), session = getsid(0);
	uid_t real, effective, saved;
	gid_t groups[64], again[64], rgid, egid, sgid;
	CHECK_IS(getresuid(&real, &effective, &saved), 0);
	CHECK_IS(getresgid(&rgid, &egid, &sgid), 0);
	int many = getgroups(64, groups);
	CHECK(many >= 0);
	struct rlimit files = { 200, 300 }, core = { 0, 0 }, got;
	CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0 && setrlimit(RLIMIT_CORE, &core) == 0);
	int nice_before = getpriority(PRIO_PROCESS, 0);
	int stopped_at = 0;
	do {
		uid_t r, e, s;
		gid_t rg, eg, sg;
		CHECK_IS(getpid(), pid);
		CHECK_IS(getppid(), parent);
		CHECK_IS(getpgrp(), group);
		CHECK_IS(getpgid(0), group);
		CHECK_IS(getsid(0), session);
		CHECK(getresuid(&r, &e, &s) == 0 && r == real && e == effective && s == saved);
		CHECK(getresgid(&rg, &eg, &sg) == 0 && rg == rgid && eg == egid && sg == sgid);
		CHECK_IS(getgroups(64, again), many);
		CHECK(memcmp(groups, again, (size_t)many * sizeof *groups) == 0);
		CHECK(getrlimit(RLIMIT_NOFILE, &got) == 0 && got.rlim_cur == 200 && got.rlim_max == 300);
		CHECK(getrlimit(RLIMIT_CORE, &got) == 0 && got.rlim_cur == 0);
		CHECK_IS(getpriority(PRIO_PROCESS, 0), nice_before);
		/* the limit is in force: the highest descriptor is 199 */
		CHECK_IS(dup2(1, 200), -1);
		CHECK_IS(errno, EBADF);
		CHECK_IS(dup2(1, 199), 199);
		CHECK_IS(close(199), 0);
		stopped_at++;
	} while (going());
	CHECK(stopped_at > 0);
	return pass();
}
