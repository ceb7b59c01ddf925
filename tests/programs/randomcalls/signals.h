/* Signals that an actor sends to itself, so that it is certain when they arrive. */
#ifndef RANDOMCALLS_SIGNALS_H
#define RANDOMCALLS_SIGNALS_H

#include "memory.h"
#include <sys/time.h>

/* Real-time signals by number: SIGRTMIN differs between C libraries. */
static const int SIGNALS_USED[] = { SIGHUP, SIGUSR1, SIGUSR2, SIGALRM, SIGTERM, SIGURG, SIGWINCH, SIGIO, 40, 41, 42 };
enum { SIGNAL_COUNT = sizeof SIGNALS_USED / sizeof *SIGNALS_USED };
/* For each: whether its arrival ends the process. */
static bool deadly[65];

static int some_signal(void)
{
	return SIGNALS_USED[draw(SIGNAL_COUNT)];
}

static uint64_t bit(int sig)
{
	return 1ull << (sig - 1);
}

static uint64_t some_mask(void)
{
	uint64_t mask = 0;
	for (int i = 0; i < SIGNAL_COUNT; i++)
		mask |= one_in(3) ? bit(SIGNALS_USED[i]) : 0;
	return mask;
}

/* SIGCHLD stays blocked: when a child ends is no affair of the order of calls. */
static uint64_t with_child(uint64_t mask)
{
	return mask | bit(SIGCHLD);
}

static void on_signal(int sig, siginfo_t *info, void *context)
{
	(void)context;
	int kept = errno;
	stack_t stack = { 0 };
	CALL(sigaltstack, NULL, &stack);
	if (info->si_code == SI_TIMER || info->si_code == SI_KERNEL)
		note("  handler %d code %d", sig, info->si_code);
	else
		note("  handler %d code %d value %d from %s stack %d", sig, info->si_code, info->si_code == SI_QUEUE ? info->si_int : 0, who(info->si_pid),
		     stack.ss_flags & SS_ONSTACK);
	/* A call in a handler. */
	for (int fd = 3; fd < MAX_FD; fd++)
		if (me.kinds[fd] == FILES) {
			note("  handler lseek(%d) = %s", fd, shown(CALL(lseek, fd, 0, SEEK_CUR)));
			break;
		}
	errno = kept;
}

static void on_plain_signal(int sig)
{
	note("  plain handler %d", sig);
}

static void op_action(void)
{
	int sig = one_in(20) ? (int)PICK(0, SIGKILL, 65, -1) : some_signal();
	struct sigaction set = { 0 }, old = { 0 };
	unsigned how = (unsigned)draw(6);
	set.sa_flags = (int)SOME(3, SA_RESTART, SA_ONSTACK, SA_NODEFER, SA_RESETHAND);
	/* Such a signal that waits is lost with a move home if it has come to be ignored (limits.md). */
	if (sig == SIGURG || sig == SIGWINCH) {
		how = 2 + how % 4;
		set.sa_flags &= ~(int)SA_RESETHAND;
	} else if (how == 1) {
		how = 2;
	}
	uint64_t mask = some_mask();
	for (int i = 1; i < 65; i++)
		if (mask & bit(i))
			sigaddset(&set.sa_mask, i);
	if (how == 0)
		set.sa_handler = SIG_DFL;
	else if (how == 1)
		set.sa_handler = SIG_IGN;
	else if (how == 2)
		set.sa_handler = on_plain_signal;
	else {
		set.sa_sigaction = on_signal;
		set.sa_flags |= SA_SIGINFO;
	}
	int result = sigaction(sig, how == 5 ? NULL : &set, &old);
	/* The library adds flags of its own; those of a default action are lost with a move (limits.md). */
	note("sigaction(%d %u %x) = %s old %d flags %x", sig, how, set.sa_flags, shown(result),
	     old.sa_handler == SIG_DFL ? 0 : old.sa_handler == SIG_IGN ? 1 : old.sa_handler == on_plain_signal ? 2 : 3,
	     old.sa_handler == SIG_DFL ? 0 : old.sa_flags & (int)(SA_RESTART | SA_ONSTACK | SA_NODEFER | SA_RESETHAND | SA_SIGINFO));
	if (result == 0 && how != 5)
		deadly[sig] = (how == 0 || (set.sa_flags & (int)SA_RESETHAND)) && sig != SIGURG && sig != SIGWINCH;
}

static bool any_deadly(uint64_t signals)
{
	for (int i = 1; i < 65; i++)
		if ((signals & bit(i)) && deadly[i])
			return true;
	return false;
}

static uint64_t pending(void)
{
	uint64_t set = 0;
	CALL(rt_sigpending, &set, 8);
	return set;
}

/* Whether several signals would be delivered at once. Away the one with the lowest number comes first; at home those for
 * the thread come before those for the process. */
static bool many(uint64_t signals)
{
	return __builtin_popcountll(signals) > 1;
}

static void op_mask(void)
{
	uint64_t mask = with_child(some_mask()), old = 0;
	long how = PICK(SIG_SETMASK, SIG_SETMASK, SIG_BLOCK, SIG_UNBLOCK, 9);
	if (how == SIG_UNBLOCK)
		mask &= ~bit(SIGCHLD);
	/* Signals that would end the program stay where they are. */
	if (any_deadly(pending()) || (how == SIG_UNBLOCK ? many(pending() & mask) : how == SIG_SETMASK && many(pending() & ~mask)))
		return;
	long result = CALL(rt_sigprocmask, how, one_in(20) ? (void *)(buffers + buffers_size) : &mask, &old, PICK(8, 8, 8, 8, 4));
	note("sigprocmask(%ld %llx) = %s old %llx", how, (unsigned long long)mask, shown(result), (unsigned long long)old);
}

static void op_raise(void)
{
	int sig = some_signal();
	if (deadly[sig])
		return;
	siginfo_t info = { .si_signo = sig, .si_code = (int)PICK(SI_QUEUE, SI_QUEUE, SI_MESGQ, SI_ASYNCIO) };
	info.si_pid = getpid();
	info.si_int = (int)draw(1000);
	long result;
	unsigned how = (unsigned)draw(7);
	long thread = CALL(gettid);
	/* The log tells the handler's lines before the call's. */
	if (how == 0)
		result = CALL(tgkill, getpid(), thread, sig);
	else if (how == 1)
		result = CALL(tkill, thread, sig);
	else if (how == 2)
		result = CALL(rt_sigqueueinfo, getpid(), sig, &info);
	else if (how == 3)
		result = CALL(rt_tgsigqueueinfo, getpid(), thread, sig, &info);
	else if (how == 4)
		result = CALL(kill, getpid(), PICK(0, 65, -1));
	else
		result = CALL(kill, getpid(), sig);
	note("raise%u(%d %d) = %s", how, sig, info.si_int, shown(result));
}

static void tell(const char *call, long result, const siginfo_t *info)
{
	if (result > 0)
		note("%s = %ld code %d value %d from %s", call, result, info->si_code, info->si_code == SI_QUEUE ? info->si_int : 0,
		     info->si_code <= 0 && info->si_code != SI_TIMER ? who(info->si_pid) : "kernel");
	else
		note("%s = %s", call, shown(result));
}

static void op_wait_signal(void)
{
	siginfo_t info = { 0 };
	struct timespec none = { 0, 0 };
	uint64_t mask = with_child(some_mask()), waiting = pending();
	long result;
	switch (draw(5)) {
	case 0:
		note("sigpending = %llx", (unsigned long long)waiting);
		break;
	case 1:
		result = CALL(rt_sigtimedwait, &mask, &info, &none, 8);
		note("sigtimedwait(%llx)", (unsigned long long)mask);
		tell("  sigtimedwait", result, &info);
		break;
	case 2:
		/* It waits only if something ends the wait. */
		waiting &= ~mask;
		if (many(waiting))
			break;
		for (int i = 0; i < SIGNAL_COUNT; i++) {
			struct sigaction now;
			int sig = SIGNALS_USED[i];
			if ((waiting & bit(sig)) && !any_deadly(waiting) && sigaction(sig, NULL, &now) == 0 && now.sa_handler != SIG_IGN && now.sa_handler != SIG_DFL) {
				result = CALL(rt_sigsuspend, &mask, 8);
				note("sigsuspend(%llx) = %s", (unsigned long long)mask, shown(result));
				break;
			}
		}
		break;
	case 3: {
		struct pollfd fds = { some_fd(STREAMS), POLLIN | POLLOUT, 0 };
		if (any_deadly(waiting) || many(waiting & ~mask))
			break;
		result = CALL(ppoll, &fds, 1, &none, &mask, 8);
		note("ppoll(%d %llx) = %s %x", fds.fd, (unsigned long long)mask, shown(result), fds.revents);
		break;
	}
	default: {
		struct signalfd_siginfo got = { 0 };
		int fd = some_fd(OF(SIGNALS));
		if (fd < 0 || one_in(4)) {
			result = CALL(signalfd4, fd, &mask, 8, SFD_NONBLOCK | SOME(3, SFD_CLOEXEC));
			if (fd < 0)
				opened(result, SIGNALS);
			note("signalfd(%d %llx) = %s", fd, (unsigned long long)mask, shown(result));
		} else if (kind_of(fd) == SIGNALS) {
			result = CALL(read, fd, &got, PICK(sizeof got, sizeof got, sizeof got, 10));
			note("signalfd read(%d) = %s signal %u code %d value %d", fd, shown(result), got.ssi_signo, got.ssi_code, got.ssi_code == SI_QUEUE ? got.ssi_int : 0);
		}
	}
	}
}

static char stacks[2][65536];

static void op_stack(void)
{
	stack_t old = { 0 }, set = { .ss_sp = stacks[draw(2)], .ss_size = (size_t)PICK(65536, 65536, 30000, 100), .ss_flags = (int)PICK(0, 0, SS_DISABLE, 1 << 31, 8) };
	/* Each thread its own: the main one has these. */
	if (me.thread)
		set.ss_flags = SS_DISABLE;
	long result = CALL(sigaltstack, one_in(5) ? NULL : &set, &old);
	note("sigaltstack(%zu %x) = %s old %zu %x", set.ss_size, (unsigned)set.ss_flags, shown(result), old.ss_size, old.ss_flags & SS_DISABLE);
}

/* Timers that end at once and are waited for, or that do not end. */
static void op_alarm(void)
{
	struct itimerval set = { .it_value = { PICK(0, 5000), 0 } }, old = { .it_value = { 0, 0 } };
	struct timespec limit = { 60, 0 };
	uint64_t mask = bit(SIGALRM), before = 0;
	siginfo_t info = { 0 };
	long result;
	switch (draw(4)) {
	case 0:
		result = CALL(setitimer, ITIMER_REAL, &set, &old);
		note("setitimer(%ld) = %s old %ld", (long)set.it_value.tv_sec, shown(result), ((long)old.it_value.tv_sec + 500) / 1000);
		break;
	case 1:
		result = CALL(alarm, PICK(0, 5000));
		note("alarm = %ld", (result + 500) / 1000);
		break;
	default:
		if (pending() & mask)
			break;
		CALL(rt_sigprocmask, SIG_BLOCK, &mask, &before, 8);
		if (one_in(2)) {
			set.it_value = (struct timeval){ 0, 1 + (long)draw(3000) };
			CALL(setitimer, ITIMER_REAL, &set, NULL);
			result = CALL(rt_sigtimedwait, &mask, &info, &limit, 8);
			tell("alarm: sigtimedwait", result, &info);
		} else {
			int timer = -1;
			struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM };
			struct itimerspec when = { .it_value = { 0, 1 + (long)draw(3000000) } }, left = { .it_value = { 0, 0 } };
			event.sigev_value.sival_int = 77;
			CALL(timer_create, CLOCK_MONOTONIC, &event, &timer);
			CALL(timer_settime, timer, 0, &when, NULL);
			result = CALL(rt_sigtimedwait, &mask, &info, &limit, 8);
			note("timer: sigtimedwait = %s code %d value %d", shown(result), info.si_code, info.si_int);
			result = CALL(timer_gettime, timer, &left);
			note("  timer_gettime = %s %ld, overrun %ld", shown(result), (long)left.it_value.tv_sec, CALL(timer_getoverrun, timer));
			CALL(timer_delete, timer);
		}
		CALL(rt_sigprocmask, SIG_SETMASK, &before, NULL, 8);
	}
}

#endif
