/* Proves: a handler that blocks all signals waits for another signal under a mask that admits it,
 * whether it comes before or during the wait; the handler's own mask is restored afterwards. The
 * handler may also wait for data of another thread while a signal that it blocks is pending. A
 * signal that only a wait admits is blocked again when its handler has run. */
#include "program.h"
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/select.h>

static volatile int entered, left, woken, ticks, urgent, quit;
static volatile int way;
static int pipes[2];

static void wake(int signal)
{
	(void)signal;
	woken++;
}

static void tick(int signal)
{
	(void)signal;
	ticks++;
}

static void hurry(int signal)
{
	(void)signal;
	urgent++;
}

static void await_signal(void)
{
	int before = woken;
	sigset_t mask;
	sigfillset(&mask);
	sigdelset(&mask, SIGUSR2);
	__atomic_add_fetch(&entered, 1, __ATOMIC_SEQ_CST);
	/* so that the signal comes just before the call, at its beginning, or later */
	for (volatile int spin = entered % 7 * 3000; spin > 0; spin--)
		;
	switch (way) {
	case 0: CHECK_IS(sigsuspend(&mask), -1); break;
	case 1: CHECK_IS(ppoll(NULL, 0, NULL, &mask), -1); break;
	default: CHECK_IS(pselect(0, NULL, NULL, NULL, NULL, &mask), -1); break;
	}
	CHECK_IS(errno, EINTR);
	CHECK_IS(woken, before + 1);
	CHECK_IS(sigprocmask(SIG_BLOCK, NULL, &mask), 0);
	CHECK_IS(sigismember(&mask, SIGUSR2), 1);
	CHECK_IS(sigismember(&mask, SIGTERM), 1);
}

static void await_thread(void)
{
	char byte;
	__atomic_add_fetch(&entered, 1, __ATOMIC_SEQ_CST);
	CHECK_IS(read(pipes[0], &byte, 1), 1);
}

static void on(int signal)
{
	(void)signal;
	int kept = errno;
	if (way < 3)
		await_signal();
	else
		await_thread();
	__atomic_add_fetch(&left, 1, __ATOMIC_SEQ_CST);
	errno = kept;
}

static void *work(void *arg)
{
	while (!quit) {
		sigset_t mask;
		CHECK_IS(pthread_sigmask(SIG_BLOCK, NULL, &mask), 0);
		CHECK_IS(sigismember(&mask, SIGUSR2), 0);
	}
	return arg;
}

static void let_through(void)
{
	sigset_t one, before, mask;
	sigemptyset(&one);
	sigaddset(&one, SIGURG);
	CHECK_IS(pthread_sigmask(SIG_BLOCK, &one, &before), 0);
	for (int i = 0; i < 20; i++) {
		int had = urgent;
		CHECK_IS(raise(SIGURG), 0);
		CHECK_IS(sigsuspend(&before), -1);
		CHECK_IS(errno, EINTR);
		CHECK_IS(urgent, had + 1);
		CHECK_IS(pthread_sigmask(SIG_BLOCK, NULL, &mask), 0);
		CHECK_IS(sigismember(&mask, SIGURG), 1);
	}
	CHECK_IS(pthread_sigmask(SIG_SETMASK, &before, NULL), 0);
}

static void await(volatile int *count, int wanted, const char *what)
{
	double begun = now();
	while (__atomic_load_n(count, __ATOMIC_SEQ_CST) < wanted) {
		sched_yield();
		if (now() > begun + 60)
			fail("FAIL way %d: %s for 60 s\n", way, what);
	}
}

int main(void)
{
	struct sigaction waits = { .sa_handler = on, .sa_flags = SA_RESTART };
	struct sigaction wakes = { .sa_handler = wake }, ticks_on = { .sa_handler = tick };
	struct sigaction hurries = { .sa_handler = hurry };
	sigfillset(&waits.sa_mask);
	CHECK_IS(sigaction(SIGUSR1, &waits, NULL), 0);
	CHECK_IS(sigaction(SIGUSR2, &wakes, NULL), 0);
	CHECK_IS(sigaction(SIGWINCH, &ticks_on, NULL), 0);
	CHECK_IS(sigaction(SIGURG, &hurries, NULL), 0);
	CHECK_IS(pipe(pipes), 0);
	pthread_t thread;
	CHECK_IS(pthread_create(&thread, NULL, work, NULL), 0);
	int rounds = 0, ticked = 0;
	do {
		way = rounds++ % 4;
		CHECK_IS(pthread_kill(thread, SIGUSR1), 0);
		await(&entered, rounds, "no handler");
		if (way < 3) {
			CHECK_IS(pthread_kill(thread, SIGUSR2), 0);
		} else {
			CHECK_IS(pthread_kill(thread, SIGWINCH), 0);
			rest_ms(2);
			CHECK_IS(write(pipes[1], "", 1), 1);
		}
		await(&left, rounds, "the handler waits on");
		ticked += way == 3;
		await(&ticks, ticked, "what was blocked does not come");
		let_through();
	} while (going());
	quit = 1;
	CHECK_IS(pthread_join(thread, NULL), 0);
	return pass();
}
