/* Proves: a signal for a thread reaches that thread, one for the process a thread that does not
 * block it; each thread has its own mask and signal stack; sigwait; a timer that signals one
 * thread. */
#include "program.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/syscall.h>

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

static _Atomic int to_me, to_all, alarms, waited;
static _Atomic pid_t who_got_it;
static _Atomic bool over;
static __thread char *stack_at;
static __thread size_t stack_size;

static void note(int signal)
{
	char here;
	CHECK(&here >= stack_at && &here < stack_at + stack_size);
	who_got_it = (pid_t)syscall(SYS_gettid);
	*(signal == SIGUSR1 ? &to_me : signal == SIGUSR2 ? &to_all : &alarms) += 1;
}

static void own_stack(void)
{
	stack_size = 64 << 10;
	stack_at = malloc(stack_size);
	stack_t stack = { .ss_sp = stack_at, .ss_size = stack_size };
	CHECK_IS(sigaltstack(&stack, NULL), 0);
}

static void mask(int how, int signal)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, signal);
	CHECK_IS(pthread_sigmask(how, &set, NULL), 0);
}

struct receiver {
	pthread_t thread;
	_Atomic pid_t tid;
};

static void *receive(void *argument)
{
	struct receiver *me = argument;
	own_stack();
	mask(SIG_UNBLOCK, SIGUSR2);
	me->tid = (pid_t)syscall(SYS_gettid);
	while (!over)
		rest_ms(1);
	return NULL;
}

static void *wait_for_it(void *argument)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN + 1);
	int signal;
	while (!over) {
		CHECK_IS(sigwait(&set, &signal), 0);
		CHECK_IS(signal, SIGRTMIN + 1);
		waited++;
	}
	return argument;
}

static void await(_Atomic int *count, int wanted)
{
	while (*count < wanted)
		rest_ms(1);
	CHECK_IS(*count, wanted);
}

int main(void)
{
	struct receiver receiver = { 0 };
	pthread_t waiter;
	struct sigaction action = { .sa_handler = note, .sa_flags = SA_ONSTACK | SA_RESTART };
	CHECK_IS(sigaction(SIGUSR1, &action, NULL), 0);
	CHECK_IS(sigaction(SIGUSR2, &action, NULL), 0);
	CHECK_IS(sigaction(SIGRTMIN + 2, &action, NULL), 0);
	own_stack();
	mask(SIG_BLOCK, SIGRTMIN + 1);
	mask(SIG_BLOCK, SIGUSR2);
	CHECK_IS(pthread_create(&waiter, NULL, wait_for_it, NULL), 0);
	CHECK_IS(pthread_create(&receiver.thread, NULL, receive, &receiver), 0);
	while (!receiver.tid)
		rest_ms(1);
	for (int round = 1; round == 1 || going(); round++) {
		CHECK_IS(pthread_kill(receiver.thread, SIGUSR1), 0);
		await(&to_me, round);
		CHECK_IS(who_got_it, receiver.tid);
		CHECK_IS(kill(getpid(), SIGUSR2), 0);
		await(&to_all, round);
		CHECK_IS(who_got_it, receiver.tid);
		CHECK_IS(kill(getpid(), SIGRTMIN + 1), 0);
		await(&waited, round);
		timer_t timer;
		struct sigevent event = { .sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMIN + 2 };
		event.sigev_notify_thread_id = receiver.tid;
		struct itimerspec soon = { .it_value = { .tv_nsec = 2000000 } };
		CHECK_IS(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
		CHECK_IS(timer_settime(timer, 0, &soon, NULL), 0);
		await(&alarms, round);
		CHECK_IS(who_got_it, receiver.tid);
		CHECK_IS(timer_delete(timer), 0);
	}
	over = true;
	CHECK_IS(kill(getpid(), SIGRTMIN + 1), 0);
	CHECK_IS(pthread_join(waiter, NULL), 0);
	CHECK_IS(pthread_join(receiver.thread, NULL), 0);
	return pass();
}
