/* Proves: processes referenced by descriptor: pidfd_open, waiting by poll and waitid, signals with
 * values sent through a pidfd, descriptors taken through a pidfd. */
#include "program.h"
#include <poll.h>
#include <sys/epoll.h>
#include <sys/syscall.h>

#ifndef P_PIDFD
#define P_PIDFD 3
#endif

static volatile sig_atomic_t seen, value, code;
static volatile pid_t from;
static void on(int signal, siginfo_t *info, void *context)
{
	(void)signal, (void)context;
	seen++, value = info->si_value.sival_int, code = info->si_code, from = info->si_pid;
}

static int hold(pid_t pid)
{
	int fd = (int)syscall(SYS_pidfd_open, pid, 0);
	CHECK(fd >= 0);
	CHECK_IS(fcntl(fd, F_GETFD), FD_CLOEXEC);
	return fd;
}
static int signal_to(int fd, int signal, siginfo_t *info) { return (int)syscall(SYS_pidfd_send_signal, fd, signal, info, 0); }

int main(void)
{
	struct sigaction action = { .sa_sigaction = on, .sa_flags = SA_SIGINFO | SA_RESTART };
	CHECK_IS(sigaction(SIGUSR1, &action, NULL), 0);
	do {
		int self = hold(getpid()), told[2], asked[2];
		seen = 0;
		CHECK_IS(signal_to(self, 0, NULL), 0);
		CHECK_IS(signal_to(self, SIGUSR1, NULL), 0);
		CHECK(seen == 1 && code == SI_USER && from == getpid());
		siginfo_t info;
		memset(&info, 0, sizeof info);
		info.si_signo = SIGUSR1, info.si_code = SI_QUEUE, info.si_value.sival_int = 77, info.si_pid = getpid();
		CHECK_IS(signal_to(self, SIGUSR1, &info), 0);
		CHECK(seen == 2 && code == SI_QUEUE && value == 77);
		info.si_signo = SIGUSR2;
		CHECK_IS(signal_to(self, SIGUSR1, &info), -1);
		CHECK_IS(errno, EINVAL);
		close(self);

		CHECK(pipe(told) == 0 && pipe(asked) == 0);
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			/* It has a file that no other process has, and signals its parent through a
			 * descriptor. */
			int file = open("/proc/self/exe", O_RDONLY), parent = hold(getppid());
			CHECK_IS(write(told[1], &file, sizeof file), sizeof file);
			char byte;
			CHECK_IS(read(asked[0], &byte, 1), 1);
			CHECK_IS(signal_to(parent, SIGUSR1, NULL), 0);
			CHECK_IS(read(asked[0], &byte, 1), 1);
			_exit(21);
		}
		int fd = hold(child), file;
		CHECK_IS(read(told[0], &file, sizeof file), sizeof file);
		int taken = (int)syscall(SYS_pidfd_getfd, fd, file, 0);
		CHECK(taken >= 0);
		CHECK_IS(fcntl(taken, F_GETFD), FD_CLOEXEC);
		char magic[4];
		CHECK_IS(read(taken, magic, 4), 4);
		CHECK(memcmp(magic, "\177ELF", 4) == 0);
		close(taken);
		CHECK_IS(syscall(SYS_pidfd_getfd, fd, 999, 0), -1);
		CHECK_IS(errno, EBADF);
		struct pollfd p = { fd, POLLIN, 0 };
		CHECK_IS(poll(&p, 1, 0), 0);
		CHECK_IS(write(asked[1], "g", 1), 1);
		while (seen < 3)
			rest_ms(2);
		CHECK_IS(from, child);
		memset(&info, 0, sizeof info);
		CHECK_IS(waitid(P_PIDFD, (id_t)fd, &info, WEXITED | WNOHANG), 0);
		CHECK_IS(info.si_pid, 0);
		int set = epoll_create1(0);
		struct epoll_event e = { EPOLLIN, { .u64 = 6 } };
		CHECK_IS(epoll_ctl(set, EPOLL_CTL_ADD, fd, &e), 0);
		CHECK_IS(write(asked[1], "g", 1), 1);
		CHECK_IS(epoll_wait(set, &e, 1, -1), 1);
		CHECK_IS(poll(&p, 1, -1), 1);
		CHECK_IS(p.revents, POLLIN);
		CHECK_IS(signal_to(fd, SIGKILL, NULL), 0); /* a zombie accepts any signal */
		CHECK_IS(waitid(P_PIDFD, (id_t)fd, &info, WEXITED | WNOWAIT), 0);
		CHECK(info.si_pid == child && info.si_code == CLD_EXITED && info.si_status == 21);
		CHECK_IS(waitid(P_PIDFD, (id_t)fd, &info, WEXITED), 0);
		CHECK_IS(waitid(P_PIDFD, (id_t)fd, &info, WEXITED), -1);
		CHECK_IS(errno, ECHILD);
		CHECK_IS(signal_to(fd, 0, NULL), -1);
		CHECK_IS(errno, ESRCH);
		CHECK_IS(syscall(SYS_pidfd_open, child, 0), -1);
		CHECK_IS(errno, ESRCH);
		close(fd), close(set), close(told[0]), close(told[1]), close(asked[0]), close(asked[1]);

		/* a child that is killed through its pidfd during a wait */
		child = fork();
		CHECK(child >= 0);
		if (child == 0)
			for (;;)
				pause();
		fd = hold(child);
		CHECK_IS(signal_to(fd, SIGTERM, NULL), 0);
		CHECK_IS(waitid(P_PIDFD, (id_t)fd, &info, WEXITED), 0);
		CHECK(info.si_code == CLD_KILLED && info.si_status == SIGTERM);
		close(fd);
	} while (going());
	return pass();
}
