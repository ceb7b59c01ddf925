/* Threads that make the steps by turns: only one runs at a time, so that the order of calls is certain. */
#ifndef RANDOMCALLS_THREADS_H
#define RANDOMCALLS_THREADS_H

#include "ipc.h"
#include <linux/futex.h>
#include <pthread.h>

enum { THREADS = 2 };
static pthread_t threads[THREADS];
/* The thread whose turn it is; the main one is 0. */
static unsigned turn;
static void (*task)(void);

static void await_turn(unsigned own)
{
	unsigned now;
	while ((now = __atomic_load_n(&turn, __ATOMIC_ACQUIRE)) != own)
		CALL(futex, &turn, FUTEX_WAIT, now, NULL, NULL, 0);
}

static void pass_turn(unsigned to)
{
	__atomic_store_n(&turn, to, __ATOMIC_RELEASE);
	CALL(futex, &turn, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* While a thread waits for its turn it blocks all signals, so that a signal for the process waits for the running one. */
static void *work(void *number)
{
	unsigned own = (unsigned)(uintptr_t)number;
	uint64_t all = ~0ull, mask = bit(SIGCHLD);
	for (;;) {
		await_turn(own);
		if (!task)
			return number;
		if (!any_deadly(pending() & ~mask) && !many(pending() & ~mask))
			CALL(rt_sigprocmask, SIG_SETMASK, &mask, NULL, 8);
		task();
		CALL(rt_sigprocmask, SIG_SETMASK, &all, &mask, 8);
		mask |= bit(SIGCHLD);
		me.thread = 0;
		pass_turn(0);
	}
}

static void start_threads(void)
{
	uint64_t all = ~0ull, mask;
	CALL(rt_sigprocmask, SIG_SETMASK, &all, &mask, 8);
	for (uintptr_t i = 0; i < THREADS; i++)
		CHECK_IS(pthread_create(&threads[i], NULL, work, (void *)(i + 1)), 0);
	CALL(rt_sigprocmask, SIG_SETMASK, &mask, NULL, 8);
}

/* Lets another thread make this step. */
static void in_thread(unsigned number, void (*what)(void))
{
	uint64_t all = ~0ull, mask;
	CALL(rt_sigprocmask, SIG_SETMASK, &all, &mask, 8);
	task = what;
	me.thread = (int)number;
	pass_turn(number);
	await_turn(0);
	/* Signals that would end the program, or be several, stay where they are. */
	if (any_deadly(pending() & ~mask) || many(pending() & ~mask))
		mask = all;
	CALL(rt_sigprocmask, SIG_SETMASK, &mask, NULL, 8);
}

static void end_threads(void)
{
	for (unsigned i = 1; i <= THREADS; i++) {
		void *result = NULL;
		task = NULL;
		pass_turn(i);
		CHECK_IS(pthread_join(threads[i - 1], &result), 0);
		CHECK_IS((uintptr_t)result, i);
	}
}

#endif
