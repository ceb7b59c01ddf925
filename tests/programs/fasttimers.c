/* Proves: a program whose timers expire faster than their signals can reach it still makes its calls, in the handler and
 * outside it; its waits are interrupted; it can stop the timer, and then no handler runs any more; the timer's signal is
 * not blocked in a child, nor in a program that one of its threads executes; no expiry is counted twice; and another
 * signal ends it. */
#include "program.h"
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/time.h>

enum { CALLS = 3, FAST_NS = 50000, FASTEST_NS = 1000 };

static timer_t timer;
static volatile sig_atomic_t count, expiries;
static int ready = -1;

static void stop_timer(int signal UNUSED)
{
	struct itimerspec none = { 0 };
	if (++count == 3)
		CHECK_IS(timer_settime(timer, 0, &none, NULL), 0);
}

static void on(int signal UNUSED, siginfo_t *info, void *context UNUSED)
{
	int kept = errno;
	count++;
	expiries += 1 + (info->si_code == SI_TIMER ? info->si_overrun : 0);
	CHECK(getppid() >= 0);
	errno = kept;
}

static void handle(int signal, int flags)
{
	struct sigaction action = { .sa_sigaction = on, .sa_flags = SA_SIGINFO | flags };
	CHECK_IS(sigaction(signal, &action, NULL), 0);
}

/* Its signal is sent to the process, or to a thread that is not the first. */
static void start_timer(int signal, long ns)
{
	int own = (int)syscall(SYS_gettid);
	struct sigevent event = { .sigev_notify = own == getpid() ? SIGEV_SIGNAL : SIGEV_THREAD_ID, .sigev_signo = signal };
	/* sigev_notify_thread_id, which has another name in each libc */
	memcpy((char *)&event + 16, &own, sizeof own);
	struct itimerspec each = { { 0, ns }, { 0, ns } };
	CHECK_IS(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
	CHECK_IS(timer_settime(timer, 0, &each, NULL), 0);
}

static void set_interval(int which, long us)
{
	struct itimerval each = { { 0, us }, { 0, us } };
	CHECK_IS(setitimer(which, &each, NULL), 0);
}

/* A timer that has just been stopped has raised its last signal. */
static void check_silence(void)
{
	sig_atomic_t last = count;
	for (int i = 0; i < CALLS; i++)
		CHECK(getppid() >= 0);
	rest_ms(1);
	CHECK_IS(count, last);
}

static void stop_in_handler(int signal, long ns)
{
	struct sigaction action = { .sa_handler = stop_timer };
	CHECK_IS(sigaction(signal, &action, NULL), 0);
	count = 0;
	start_timer(signal, ns);
	while (count < 3)
		;
	CHECK_IS(timer_delete(timer), 0);
}

/* A program that was executed among expiries. */
static int run_as_new_program(int signal)
{
	sigset_t blocked;
	CHECK_IS(sigprocmask(SIG_BLOCK, NULL, &blocked), 0);
	CHECK(!sigismember(&blocked, signal));
	handle(signal, 0);
	CHECK_IS(raise(signal), 0);
	CHECK_IS(count, 1);
	return 0;
}

/* Executes this program among expiries that are sent to this thread. */
static void *execute(void *signal_number)
{
	int signal = *(int *)signal_number;
	char number[16];
	snprintf(number, sizeof number, "%d", signal);
	count = 0;
	start_timer(signal, FAST_NS);
	while (count < 5)
		;
	execl("/proc/self/exe", "fasttimers", number, NULL);
	fail("FAIL: execl: %s\n", strerror(errno));
}

static void execute_in_child(int signal, bool in_other_thread)
{
	int status;
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		pthread_t other;
		handle(signal, SA_RESTART);
		if (!in_other_thread)
			execute(&signal);
		CHECK_IS(pthread_create(&other, NULL, execute, &signal), 0);
		for (;;)
			pause();
	}
	CHECK_IS(waitpid(child, &status, 0), child);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Calls that do not wait, calls that do, and a changed signal mask, all among expiries. */
static void make_calls(int signal)
{
	sigset_t one, before, waiting;
	sigemptyset(&one), sigaddset(&one, signal);
	int pipes[2], status;
	char byte = 1;
	CHECK_IS(pipe(pipes), 0);
	for (int i = 0; i < CALLS; i++) {
		CHECK(getppid() >= 0);
		CHECK_IS(write(pipes[1], &byte, 1), 1);
		CHECK_IS(read(pipes[0], &byte, 1), 1);
		CHECK_IS(sigpending(&waiting), 0);
		CHECK(!sigismember(&waiting, signal));
		CHECK_IS(sigprocmask(SIG_BLOCK, &one, &before), 0);
		CHECK(!sigismember(&before, signal));
		/* what is blocked by the program waits for the program */
		sig_atomic_t blocked_at = count;
		CHECK_IS(sigwaitinfo(&one, NULL), signal);
		CHECK_IS(count, blocked_at);
		CHECK_IS(sigprocmask(SIG_SETMASK, &before, NULL), 0);
		CHECK(sigsuspend(&before) == -1 && errno == EINTR);
	}
	/* a child has the mask of the program, and no timer */
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		count = 0;
		CHECK_IS(sigprocmask(SIG_BLOCK, NULL, &waiting), 0);
		CHECK(!sigismember(&waiting, signal));
		raise(signal);
		_exit(count > 0 ? 0 : 1);
	}
	CHECK_IS(waitpid(child, &status, 0), child);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	close(pipes[0]), close(pipes[1]);
}

static void among_interval_expiries(int which, int signal, long us)
{
	handle(signal, SA_RESTART);
	count = 0;
	set_interval(which, us);
	if (which == ITIMER_REAL)
		make_calls(signal);
	while (count < 5)
		CHECK(getppid() >= 0);
	set_interval(which, 0);
	check_silence();
}

static void among_timer_expiries(int signal)
{
	handle(signal, SA_RESTART);
	double begun = now();
	count = expiries = 0;
	start_timer(signal, FAST_NS);
	make_calls(signal);
	while (count < 20)
		;
	CHECK_IS(timer_delete(timer), 0);
	CHECK(expiries <= (now() - begun) * 1e9 / FAST_NS);
	check_silence();
}

/* The expiries interrupt a wait, and a signal that the program sends itself is handled before that call returns. */
static void while_waiting(void)
{
	int pipes[2];
	char byte;
	CHECK_IS(pipe(pipes), 0);
	handle(SIGUSR1, 0);
	start_timer(SIGUSR1, FAST_NS);
	for (int i = 0; i < CALLS; i++) {
		CHECK(read(pipes[0], &byte, 1) == -1 && errno == EINTR);
		sig_atomic_t before = count;
		CHECK_IS(raise(SIGUSR1), 0);
		CHECK(count > before);
	}
	CHECK_IS(timer_delete(timer), 0);
	close(pipes[0]), close(pipes[1]);
}

static void say_ready(int signal UNUSED)
{
	char byte = 1;
	int kept = errno;
	if (count++ == 5)
		CHECK_IS(write(ready, &byte, 1), 1);
	errno = kept;
}

/* A signal that has no handler ends the program, although one of a lower number always waits. */
static void end_by_signal(void)
{
	int pipes[2], status;
	char byte = 1;
	CHECK_IS(pipe(pipes), 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		struct sigaction action = { .sa_handler = say_ready };
		ready = pipes[1], count = 0;
		CHECK_IS(sigaction(SIGUSR1, &action, NULL), 0);
		start_timer(SIGUSR1, FASTEST_NS);
		for (;;)
			;
	}
	CHECK_IS(read(pipes[0], &byte, 1), 1);
	CHECK_IS(kill(child, SIGTERM), 0);
	CHECK_IS(waitpid(child, &status, 0), child);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
	close(pipes[0]), close(pipes[1]);
}

int main(int argc, char **argv)
{
	if (argc > 1)
		return run_as_new_program(atoi(argv[1]));
	do {
		stop_in_handler(SIGUSR1, FAST_NS);
		stop_in_handler(SIGUSR1, FASTEST_NS);
		stop_in_handler(SIGRTMIN, FAST_NS);
		among_interval_expiries(ITIMER_REAL, SIGALRM, FAST_NS / 1000);
		among_interval_expiries(ITIMER_PROF, SIGPROF, 1);
		among_timer_expiries(SIGUSR1);
		among_timer_expiries(SIGRTMIN);
		while_waiting();
		execute_in_child(SIGUSR1, false);
		execute_in_child(SIGRTMIN, true);
		end_by_signal();
	} while (going());
	return pass();
}
