/* Proves: sigprocmask, sigpending, sigsuspend, sigtimedwait, signalfd and queued signals with their
 * values: blocked signals stay pending, also over a move and if they are to be ignored, and none is
 * lost, doubled or out of order. */
#include "program.h"
#include <sys/signalfd.h>

static volatile sig_atomic_t seen[65];
static void on(int signal) { seen[signal]++; }

int main(void)
{
	struct sigaction action = { .sa_handler = on };
	int rt = SIGRTMIN + 3;
	CHECK_IS(sigaction(SIGUSR1, &action, NULL), 0);
	CHECK_IS(sigaction(SIGUSR2, &action, NULL), 0);
	sigset_t blocked, before, pending, two;
	sigemptyset(&blocked), sigaddset(&blocked, SIGUSR1), sigaddset(&blocked, SIGUSR2), sigaddset(&blocked, rt);
	/* These are ignored when they are not blocked, and wait from now on. So are the notices of a timer. */
	const int discarded[] = { SIGCHLD, SIGWINCH, SIGURG, SIGRTMIN + 5, SIGHUP };
	const int notice = SIGRTMIN + 6;
	sigset_t ignored;
	sigemptyset(&ignored), sigaddset(&ignored, notice);
	for (int i = 0; i < 5; i++)
		sigaddset(&ignored, discarded[i]);
	CHECK(signal(SIGRTMIN + 5, SIG_IGN) != SIG_ERR && signal(SIGHUP, SIG_IGN) != SIG_ERR);
	CHECK(signal(notice, SIG_IGN) != SIG_ERR && signal(SIGWINCH, SIG_DFL) != SIG_ERR);
	struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = notice };
	struct itimerspec every = { { 0, 2000000 }, { 0, 2000000 } }, never = { { 0, 0 }, { 0, 0 } };
	timer_t timer;
	CHECK_IS(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
	CHECK_IS(sigprocmask(SIG_BLOCK, &ignored, NULL), 0);
	for (int i = 0; i < 5; i++)
		CHECK_IS(kill(getpid(), discarded[i]), 0);
	int value = 0;
	do {
		memset((void *)seen, 0, sizeof seen);
		CHECK_IS(sigprocmask(SIG_BLOCK, &blocked, &before), 0);
		CHECK(!sigismember(&before, SIGUSR1));
		CHECK_IS(kill(getpid(), SIGUSR1), 0);
		CHECK_IS(kill(getpid(), SIGUSR1), 0);
		for (volatile int spin = 0; spin < 3000000; spin++)
			;
		rest_ms(10);
		CHECK_IS(sigpending(&pending), 0);
		CHECK(sigismember(&pending, SIGUSR1) && !sigismember(&pending, SIGUSR2));
		CHECK_IS(seen[SIGUSR1], 0);
		CHECK_IS(raise(SIGUSR2), 0);
		sigfillset(&two), sigdelset(&two, SIGUSR2);
		CHECK_IS(sigsuspend(&two), -1); /* lets in only this one */
		CHECK_IS(errno, EINTR);
		CHECK(seen[SIGUSR2] == 1 && seen[SIGUSR1] == 0);
		CHECK_IS(sigprocmask(SIG_SETMASK, &before, NULL), 0);
		CHECK_IS(seen[SIGUSR1], 1); /* sent twice, pending once: not a real-time signal */

		/* real-time signals queue, in order, with their values */
		CHECK_IS(sigprocmask(SIG_BLOCK, &blocked, NULL), 0);
		sigset_t only;
		sigemptyset(&only), sigaddset(&only, rt);
		for (int i = 0; i < 5; i++)
			CHECK_IS(sigqueue(getpid(), rt, (union sigval){ .sival_int = value + i }), 0);
		for (volatile int spin = 0; spin < 3000000; spin++)
			;
		siginfo_t info;
		struct timespec wait = { 5, 0 }, brief = { 0, 30000000 };
		for (int i = 0; i < 4; i++) {
			CHECK_IS(sigtimedwait(&only, &info, &wait), rt);
			CHECK_IS(info.si_value.sival_int, value + i);
			CHECK_IS(info.si_code, SI_QUEUE);
			CHECK_IS(info.si_pid, getpid());
		}
		int fd = signalfd(-1, &only, SFD_CLOEXEC);
		struct signalfd_siginfo from_fd;
		CHECK(fd >= 0);
		CHECK_IS(read(fd, &from_fd, sizeof from_fd), sizeof from_fd);
		CHECK_IS(from_fd.ssi_signo, rt);
		CHECK_IS(from_fd.ssi_int, value + 4);
		close(fd);
		value += 5;
		double begun = now();
		CHECK_IS(sigtimedwait(&only, &info, &brief), -1);
		CHECK_IS(errno, EAGAIN);
		CHECK(now() - begun > 0.029 && now() - begun < 8);

		/* one that a child sends during the wait */
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			rest_ms(30);
			_exit(kill(getppid(), SIGUSR1) == 0 ? 0 : 1);
		}
		sigemptyset(&only), sigaddset(&only, SIGUSR1);
		CHECK_IS(sigwaitinfo(&only, &info), SIGUSR1);
		CHECK_IS(info.si_pid, child);
		await_exit(child, 0);
		CHECK_IS(sigprocmask(SIG_SETMASK, &before, NULL), 0);
		CHECK_IS(seen[SIGUSR1], 1);

		CHECK_IS(sigpending(&pending), 0);
		for (int i = 0; i < 5; i++)
			CHECK(sigismember(&pending, discarded[i]));
		CHECK_IS(timer_settime(timer, 0, &every, NULL), 0);
		sigemptyset(&only), sigaddset(&only, notice);
		for (int i = 0; i < 20; i++)
			CHECK_IS(sigtimedwait(&only, &info, &wait), notice);
		CHECK_IS(timer_settime(timer, 0, &never, NULL), 0);
	} while (going());
	CHECK_IS(sigprocmask(SIG_UNBLOCK, &ignored, NULL), 0);
	CHECK_IS(sigpending(&pending), 0);
	for (int i = 0; i < 5; i++)
		CHECK(!sigismember(&pending, discarded[i]));
	return pass();
}
