/* Proves: a tree of forks, two levels of three, each with its own memory, parent, pid and exit
 * code. */
#include "program.h"

static int mine;

static pid_t branch(int level, int number, pid_t parent)
{
	pid_t self = fork();
	CHECK(self >= 0);
	if (self)
		return self;
	CHECK_IS(getppid(), parent);
	CHECK(getpid() != parent);
	mine = mine * 10 + number;
	int own = mine;
	if (level > 1) {
		pid_t children[3];
		for (int i = 0; i < 3; i++)
			children[i] = branch(level - 1, i + 1, getpid());
		for (int i = 0; i < 3; i++)
			await_exit(children[i], own * 10 + i + 1);
	} else {
		volatile uint64_t sum = 0;
		for (int i = 0; i < 200000; i++)
			sum += (uint64_t)i;
	}
	CHECK_IS(mine, own); /* the children changed only their copies */
	_exit(own);
}

int main(void)
{
	int status;
	do {
		pid_t children[3], ended[3] = { 0, 0, 0 };
		for (int i = 0; i < 3; i++) {
			children[i] = branch(2, i + 1, getpid());
			CHECK(children[i] != getpid());
		}
		CHECK_IS(mine, 0);
		/* the first by its pid, the others in the order in which they end */
		await_exit(children[0], 1);
		for (int i = 1; i < 3; i++) {
			pid_t pid = wait(&status);
			int which = pid == children[1] ? 1 : 2;
			CHECK(pid == children[which] && !ended[which]);
			CHECK(WIFEXITED(status));
			CHECK_IS(WEXITSTATUS(status), which + 1);
			ended[which] = pid;
		}
		CHECK_IS(wait(&status), -1);
		CHECK_IS(errno, ECHILD);
		CHECK_IS(kill(children[0], 0), -1);
		CHECK_IS(errno, ESRCH);

		/* one killed, one seen stopped and continued, one left a zombie for a while */
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0)
			for (;;)
				pause();
		CHECK_IS(waitpid(child, &status, WNOHANG), 0);
		CHECK_IS(kill(child, SIGSTOP), 0);
		CHECK_IS(waitpid(child, &status, WUNTRACED), child);
		CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
		CHECK_IS(kill(child, SIGCONT), 0);
		CHECK_IS(waitpid(child, &status, WCONTINUED), child);
		CHECK(WIFCONTINUED(status));
		CHECK_IS(kill(child, SIGTERM), 0);
		siginfo_t info;
		CHECK_IS(waitid(P_PID, (id_t)child, &info, WEXITED | WNOWAIT), 0);
		CHECK(info.si_code == CLD_KILLED && info.si_status == SIGTERM && info.si_pid == child);
		CHECK_IS(waitpid(child, &status, 0), child);
		CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
	} while (going());
	return pass();
}
