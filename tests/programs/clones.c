/* Proves: how children are created and waited for: clone and clone3 with their flags, exit signals
 * other than SIGCHLD, siblings, shared descriptors and folders, pidfds; every way of waiting. */
#include "program.h"
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>

#ifndef P_PIDFD
#define P_PIDFD 3
#endif
#ifndef __WALL
#define __WALL 0x40000000
#define __WCLONE 0x80000000
#endif

static volatile sig_atomic_t seen[65], code, status_told;
static volatile pid_t from;
static void on(int signal, siginfo_t *info, void *context)
{
	(void)context;
	seen[signal]++, code = info->si_code, from = info->si_pid, status_told = info->si_status;
}

static void handle(int signal)
{
	struct sigaction action = { .sa_sigaction = on, .sa_flags = SA_SIGINFO | SA_RESTART };
	CHECK_IS(sigaction(signal, &action, NULL), 0);
}

static pid_t raw_clone(unsigned long flags, int *parent_tid, int *child_tid)
{
	return (pid_t)syscall(SYS_clone, flags, 0, parent_tid, child_tid, 0);
}

/* struct clone_args, in the size that all kernels support */
struct args {
	uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls;
};
static pid_t raw_clone3(struct args *args) { return (pid_t)syscall(SYS_clone3, args, sizeof *args); }

static void await_seen(int signal, int times)
{
	for (int i = 0; seen[signal] < times && i < 30000; i++)
		rest_ms(1);
	CHECK_IS(seen[signal], times);
}

/* A child's exit signal, and how wait treats a child with another exit signal than SIGCHLD. */
static void exit_signals(void)
{
	int status;
	handle(SIGUSR1), handle(SIGCHLD);
	memset((void *)seen, 0, sizeof seen);
	pid_t child = raw_clone(SIGUSR1, NULL, NULL);
	CHECK(child >= 0);
	if (child == 0)
		_exit(12);
	await_seen(SIGUSR1, 1);
	CHECK(seen[SIGCHLD] == 0 && from == child && code == CLD_EXITED && status_told == 12);
	CHECK_IS(waitpid(child, &status, 0), -1); /* a clone child is not waited for without __WCLONE */
	CHECK_IS(errno, ECHILD);
	CHECK_IS(waitpid(child, &status, __WCLONE), child);
	CHECK_IS(WEXITSTATUS(status), 12);
	child = raw_clone(0, NULL, NULL); /* no exit signal */
	CHECK(child >= 0);
	if (child == 0) {
		rest_ms(5);
		_exit(13);
	}
	CHECK_IS(waitpid(child, &status, __WALL), child);
	CHECK_IS(WEXITSTATUS(status), 13);
	CHECK(seen[SIGCHLD] == 0 && seen[SIGUSR1] == 1);
	child = raw_clone(SIGCHLD, NULL, NULL);
	CHECK(child >= 0);
	if (child == 0)
		_exit(14);
	await_seen(SIGCHLD, 1);
	CHECK_IS(waitpid(child, &status, __WCLONE | WNOHANG), -1);
	await_exit(child, 14);
	/* after an exec the exit signal is SIGCHLD again */
	child = raw_clone(SIGUSR1, NULL, NULL);
	CHECK(child >= 0);
	if (child == 0) {
		execl("/bin/true", "true", NULL);
		_exit(1);
	}
	await_seen(SIGCHLD, 2);
	CHECK_IS(seen[SIGUSR1], 1);
	await_exit(child, 0);
	signal(SIGCHLD, SIG_DFL);
}

static void flags(void)
{
	static int told, written;
	told = written = -1;
	pid_t child = raw_clone(CLONE_PARENT_SETTID | CLONE_CHILD_SETTID | SIGCHLD, &told, &written);
	CHECK(child >= 0);
	if (child == 0) {
		CHECK_IS(written, getpid());
		CHECK_IS(told, -1); /* set only after the memory was copied */
		_exit(0);
	}
	CHECK_IS(told, child);
	CHECK_IS(written, -1);
	await_exit(child, 0);

	/* shared descriptors: opens and closes of the child are visible here */
	int ends[2];
	CHECK_IS(pipe(ends), 0);
	int high = fcntl(ends[0], F_DUPFD, 300);
	child = raw_clone(CLONE_FILES | SIGCHLD, NULL, NULL);
	CHECK(child >= 0);
	if (child == 0) {
		CHECK_IS(close(high), 0);
		CHECK_IS(dup2(ends[1], 301), 301);
		_exit(0);
	}
	await_exit(child, 0);
	CHECK_IS(fcntl(high, F_GETFD), -1);
	CHECK_IS(write(301, "x", 1), 1);
	close(301), close(ends[0]), close(ends[1]);

	/* shared working directory and file creation mask */
	mode_t before = umask(022);
	child = raw_clone(CLONE_FS | SIGCHLD, NULL, NULL);
	CHECK(child >= 0);
	if (child == 0) {
		CHECK_IS(chdir("/usr"), 0);
		CHECK_IS(umask(077), 022);
		_exit(0);
	}
	await_exit(child, 0);
	char where[64];
	CHECK(getcwd(where, sizeof where) && strcmp(where, "/usr") == 0);
	CHECK_IS(chdir("/"), 0);
	CHECK_IS(umask(before), 077);

	/* a sibling: a child of this process's parent */
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		pid_t parent = getppid(), sibling = raw_clone(CLONE_PARENT | SIGCHLD, NULL, NULL);
		CHECK(sibling >= 0);
		if (sibling == 0) {
			CHECK_IS(getppid(), parent);
			_exit(16);
		}
		CHECK_IS(waitpid(sibling, NULL, 0), -1);
		CHECK_IS(errno, ECHILD);
		_exit(15);
	}
	int sum = 0, status;
	for (int i = 0; i < 2; i++) {
		CHECK(wait(&status) > 0);
		CHECK(WIFEXITED(status));
		sum += WEXITSTATUS(status);
	}
	CHECK_IS(sum, 31);
	CHECK_IS(wait(&status), -1);

	/* a pidfd for the child */
	int fd = -1;
	child = raw_clone(CLONE_PIDFD | SIGCHLD, &fd, NULL);
	CHECK(child >= 0);
	if (child == 0) {
		rest_ms(10);
		_exit(17);
	}
	CHECK(fd >= 0);
	CHECK_IS(fcntl(fd, F_GETFD), FD_CLOEXEC);
	struct pollfd p = { fd, POLLIN, 0 };
	CHECK_IS(poll(&p, 1, -1), 1);
	siginfo_t info;
	CHECK_IS(waitid(P_PIDFD, (id_t)fd, &info, WEXITED), 0);
	CHECK(info.si_pid == child && info.si_status == 17);
	close(fd);

	CHECK_IS(raw_clone(CLONE_SIGHAND | SIGCHLD, NULL, NULL), -1);
	CHECK_IS(errno, EINVAL);
}

/* clone3, where the kernel has it. */
static void third(void)
{
	static int child_tid, parent_tid, fd;
	struct args a = { .exit_signal = SIGCHLD };
	pid_t child = raw_clone3(&a);
	if (child < 0) {
		CHECK_IS(errno, ENOSYS);
		return;
	}
	if (child == 0)
		_exit(18);
	await_exit(child, 18);
	child_tid = parent_tid = fd = -1;
	a = (struct args){ .flags = CLONE_PARENT_SETTID | CLONE_CHILD_SETTID, .child_tid = (uintptr_t)&child_tid,
			   .parent_tid = (uintptr_t)&parent_tid, .exit_signal = SIGUSR1 };
	memset((void *)seen, 0, sizeof seen);
	child = raw_clone3(&a);
	CHECK(child >= 0);
	if (child == 0)
		_exit(child_tid == getpid() ? 19 : 1);
	CHECK(parent_tid == child && child_tid == -1);
	await_seen(SIGUSR1, 1);
	int status;
	CHECK_IS(waitpid(child, &status, __WALL), child);
	CHECK_IS(WEXITSTATUS(status), 19);
	a = (struct args){ .flags = CLONE_PIDFD | CLONE_FILES, .pidfd = (uintptr_t)&fd, .exit_signal = SIGCHLD };
	child = raw_clone3(&a);
	if (child < 0) {
		CHECK_IS(errno, ENOSYS); /* not every flag is supported everywhere */
	} else {
		if (child == 0)
			_exit(close(200) == 0 ? 1 : 20);
		siginfo_t info;
		CHECK_IS(waitid(P_PIDFD, (id_t)fd, &info, WEXITED), 0);
		CHECK_IS(info.si_status, 20);
		close(fd);
	}
	/* a pidfd and the parent's tid word, which have one argument in clone */
	parent_tid = fd = -1;
	a = (struct args){ .flags = CLONE_PIDFD | CLONE_PARENT_SETTID, .pidfd = (uintptr_t)&fd,
			   .parent_tid = (uintptr_t)&parent_tid, .exit_signal = SIGCHLD };
	child = raw_clone3(&a);
	CHECK(child >= 0);
	if (child == 0)
		_exit(parent_tid == -1 ? 21 : 1);
	CHECK_IS(parent_tid, child);
	CHECK_IS(fcntl(fd, F_GETFD), FD_CLOEXEC);
	siginfo_t ended;
	CHECK_IS(waitid(P_PIDFD, (id_t)fd, &ended, WEXITED), 0);
	CHECK_IS(ended.si_status, 21);
	close(fd);
	a.parent_tid = a.pidfd;
	CHECK_IS(raw_clone3(&a), -1);
	CHECK_IS(errno, EINVAL);
	CHECK_IS(raw_clone(CLONE_PIDFD | CLONE_PARENT_SETTID | SIGCHLD, &fd, NULL), -1);
	CHECK_IS(errno, EINVAL);
	/* invalid flags are refused */
	a = (struct args){ .exit_signal = 0x1000 };
	CHECK_IS(raw_clone3(&a), -1);
	CHECK(errno == EINVAL || errno == ENOSYS);
	a = (struct args){ .flags = CLONE_PARENT_SETTID, .stack_size = 5, .exit_signal = SIGCHLD };
	CHECK_IS(raw_clone3(&a), -1);
	CHECK(errno == EINVAL || errno == ENOSYS);
}

static char stack[65536] __attribute__((aligned(16)));
static volatile int shared;
static int on_stack(void *arg)
{
	shared += *(int *)arg;
	return 23;
}

/* glibc's clone, with a stack, in the parent's memory and in a copy. */
static void libcs(void)
{
	int four = 4;
	shared = 0;
	pid_t child = clone(on_stack, stack + sizeof stack, SIGCHLD, &four);
	CHECK(child > 0);
	await_exit(child, 23);
	CHECK_IS(shared, 0);
	child = clone(on_stack, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, &four);
	CHECK(child > 0);
	CHECK_IS(shared, 4);
	await_exit(child, 23);
}

/* Waiting by group and by kind, with WNOWAIT, with WNOHANG; with resource usage. */
static void waiting(void)
{
	pid_t children[3];
	siginfo_t info;
	int status, go[2];
	CHECK_IS(pipe(go), 0);
	for (int i = 0; i < 3; i++) {
		children[i] = fork();
		CHECK(children[i] >= 0);
		if (children[i] == 0) {
			char byte;
			close(go[1]);
			CHECK_IS(setpgid(0, 0), 0);
			CHECK_IS(read(go[0], &byte, 1), 0);
			_exit(50 + i);
		}
		setpgid(children[i], children[i]);
	}
	memset(&info, 0xff, sizeof info);
	CHECK_IS(waitid(P_ALL, 0, &info, WEXITED | WSTOPPED | WNOHANG), 0);
	CHECK(info.si_pid == 0 && info.si_signo == 0);
	CHECK_IS(waitpid(-children[2], &status, WNOHANG), 0);
	CHECK_IS(waitpid(-9999999, &status, WNOHANG), -1);
	CHECK_IS(errno, ECHILD);
	CHECK_IS(kill(children[1], SIGSTOP), 0);
	CHECK_IS(waitid(P_PID, (id_t)children[1], &info, WSTOPPED | WNOWAIT), 0);
	CHECK(info.si_code == CLD_STOPPED && info.si_status == SIGSTOP);
	CHECK_IS(waitid(P_ALL, 0, &info, WSTOPPED), 0);
	CHECK_IS(info.si_pid, children[1]);
	CHECK_IS(kill(children[1], SIGCONT), 0);
	CHECK_IS(waitid(P_PGID, (id_t)children[1], &info, WCONTINUED), 0);
	CHECK(info.si_code == CLD_CONTINUED && info.si_status == SIGCONT && info.si_pid == children[1]);
	close(go[0]), close(go[1]);
	CHECK_IS(waitid(P_PGID, (id_t)children[2], &info, WEXITED | WNOWAIT), 0);
	CHECK(info.si_pid == children[2] && info.si_status == 52);
	CHECK_IS(waitpid(-children[2], &status, 0), children[2]);
	CHECK_IS(waitpid(-children[2], &status, 0), -1);
	CHECK_IS(syscall(SYS_waitid, P_PID, children[0], &info, WEXITED, NULL), 0);
	CHECK(info.si_pid == children[0] && info.si_status == 50);
	CHECK_IS(syscall(SYS_waitid, P_PID, children[1], NULL, WEXITED, NULL), 0);
	CHECK_IS(waitid(P_ALL, 0, &info, WEXITED), -1);
	CHECK_IS(errno, ECHILD);
	CHECK_IS(waitid(P_ALL, 0, &info, 0), -1);
	CHECK_IS(errno, EINVAL);
}

int main(void)
{
	do {
		exit_signals();
		flags();
		third();
		libcs();
		waiting();
	} while (going());
	return pass();
}
