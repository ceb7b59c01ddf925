/* Proves: families whose first process has ended: daemons by double fork, subreapers, sessions and
 * groups, trees ten deep, many zombies, and the parent of an orphan. */
#include "program.h"
#include <sys/prctl.h>

/* A daemon is reparented to the nearest subreaper: this process. */
static void daemons(void)
{
	int told[2];
	CHECK_IS(pipe(told), 0);
	pid_t reaper = getpid(), child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		CHECK_IS(setsid(), getpid());
		pid_t between = getpid();
		if (fork())
			_exit(1);
		/* a member of the session, not its leader */
		CHECK_IS(getsid(0), between);
		CHECK(getpgid(0) == between && getpid() != between);
		for (int i = 0; getppid() == between && i < 30000; i++)
			rest_ms(1);
		CHECK_IS(getppid(), reaper);
		pid_t self = getpid();
		CHECK_IS(write(told[1], &self, sizeof self), sizeof self);
		rest_ms(15);
		_exit(61);
	}
	await_exit(child, 1);
	pid_t orphan;
	CHECK_IS(read(told[0], &orphan, sizeof orphan), sizeof orphan);
	await_exit(orphan, 61);
	close(told[0]), close(told[1]);
}

/* A subreaper further down is nearer; when it ends, its orphans are reparented to this process. */
static void reapers(void)
{
	int told[2], seen[2];
	CHECK(pipe(told) == 0 && pipe(seen) == 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		int is = -1, status;
		CHECK_IS(prctl(PR_GET_CHILD_SUBREAPER, &is), 0);
		CHECK_IS(is, 0); /* not inherited */
		CHECK_IS(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
		pid_t middle = fork();
		CHECK(middle >= 0);
		if (middle == 0) {
			pid_t heads[2] = { getpid(), 0 }, leaf = fork();
			if (leaf)
				_exit(leaf > 0 ? 2 : 1);
			for (int i = 0; getppid() == heads[0] && i < 30000; i++)
				rest_ms(1);
			heads[0] = getppid();
			CHECK_IS(write(seen[1], "r", 1), 1);
			for (int i = 0; getppid() == heads[0] && i < 30000; i++)
				rest_ms(1);
			heads[1] = getppid();
			CHECK_IS(write(told[1], heads, sizeof heads), sizeof heads);
			_exit(62);
		}
		await_exit(middle, 2);
		char byte;
		CHECK_IS(read(seen[0], &byte, 1), 1);
		CHECK_IS(waitpid(-1, &status, WNOHANG), 0); /* the leaf is a child of this process now */
		_exit(63);
	}
	await_exit(child, 63);
	pid_t heads[2];
	CHECK_IS(read(told[0], heads, sizeof heads), sizeof heads);
	CHECK_IS(heads[0], child);
	CHECK_IS(heads[1], getpid());
	int status;
	CHECK(wait(&status) > 0);
	CHECK_IS(WEXITSTATUS(status), 62);
	close(told[0]), close(told[1]), close(seen[0]), close(seen[1]);
}

/* Each is the parent of the next, ten deep; the statuses are passed up. */
static int deeper(int level, int out)
{
	if (level == 10) {
		CHECK_IS(write(out, "d", 1), 1);
		rest_ms(20);
		return 1;
	}
	pid_t parent = getpid(), child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		CHECK_IS(getppid(), parent);
		_exit(deeper(level + 1, out));
	}
	int status;
	CHECK_IS(waitpid(child, &status, 0), child);
	CHECK(WIFEXITED(status));
	return WEXITSTATUS(status) + level;
}

static void tree(void)
{
	int told[2];
	CHECK_IS(pipe(told), 0);
	CHECK_IS(deeper(0, told[1]), 46);
	char byte;
	CHECK_IS(read(told[0], &byte, 1), 1);
	close(told[0]), close(told[1]);
}

/* Many zombies: their pids and statuses stay. */
static void zombies(void)
{
	pid_t children[20];
	for (int i = 0; i < 20; i++) {
		children[i] = fork();
		CHECK(children[i] >= 0);
		if (children[i] == 0) {
			if (i % 5 == 4)
				kill(getpid(), SIGTERM);
			_exit(i);
		}
	}
	rest_ms(30);
	for (int i = 19; i >= 0; i--) {
		int status;
		CHECK_IS(kill(children[i], 0), 0);
		CHECK_IS(waitpid(children[i], &status, 0), children[i]);
		if (i % 5 == 4)
			CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
		else
			CHECK_IS(WEXITSTATUS(status), i);
		CHECK_IS(kill(children[i], 0), -1);
	}
	CHECK_IS(wait(NULL), -1);
	CHECK_IS(errno, ECHILD);
}

static void groups(void)
{
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		CHECK_IS(getpgrp(), getpgid(getppid()));
		CHECK_IS(setpgid(0, 0), 0);
		CHECK_IS(getpgrp(), getpid());
		CHECK_IS(setsid(), -1); /* a group leader cannot */
		CHECK_IS(errno, EPERM);
		pid_t inner = fork();
		CHECK(inner >= 0);
		if (inner == 0) {
			CHECK_IS(setsid(), getpid());
			CHECK(getsid(0) == getpid() && getpgrp() == getpid());
			CHECK_IS(setpgid(0, getppid()), -1); /* a session leader cannot change its group */
			CHECK_IS(errno, EPERM);
			CHECK_IS(open("/dev/tty", O_RDWR), -1);
			CHECK_IS(errno, ENXIO);
			_exit(7);
		}
		await_exit(inner, 7);
		CHECK_IS(setpgid(getppid(), 0), -1);
		CHECK_IS(errno, ESRCH);
		_exit(64);
	}
	await_exit(child, 64);
}

int main(void)
{
	CHECK_IS(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
	do {
		daemons();
		reapers();
		tree();
		zombies();
		groups();
	} while (going());
	return pass();
}
