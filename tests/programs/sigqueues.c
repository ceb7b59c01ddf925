/* Proves: how signals are sent and queued: every way to send one with its siginfo, order of
 * real-time signals, signals for a group, a thread, a zombie; the flags of sigaction; death by
 * the parent's end; stop and continue. */
#include "program.h"
#include <setjmp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static volatile sig_atomic_t seen, log_length;
static volatile struct {
	int signal, code, value, pid;
} record[64];

static void on(int signal, siginfo_t *info, void *context)
{
	(void)context;
	if (log_length < 64) {
		record[log_length].signal = signal, record[log_length].code = info->si_code;
		record[log_length].value = info->si_value.sival_int, record[log_length].pid = info->si_pid;
	}
	log_length++, seen++;
}

static void handle(int signal, int flags)
{
	struct sigaction action = { .sa_sigaction = on, .sa_flags = flags | SA_SIGINFO };
	sigfillset(&action.sa_mask);
	CHECK_IS(sigaction(signal, &action, NULL), 0);
}

static void mask(int how, int first, int last)
{
	sigset_t set;
	sigemptyset(&set);
	for (int s = first; s <= last; s++)
		sigaddset(&set, s);
	CHECK_IS(sigprocmask(how, &set, NULL), 0);
}

static int queue_to_thread(pid_t pid, pid_t tid, int signal, int code, int value)
{
	siginfo_t info;
	memset(&info, 0, sizeof info);
	info.si_signo = signal, info.si_code = code, info.si_pid = getpid(), info.si_uid = getuid();
	info.si_value.sival_int = value;
	return (int)syscall(SYS_rt_tgsigqueueinfo, pid, tid, signal, &info);
}

static void await_log(int length)
{
	for (int i = 0; i < 2 || (log_length < length && i < 15000); i++)
		rest_ms(2);
	CHECK_IS(log_length, length);
}

/* Lowest number first, and signals of one number in the order in which they were sent. */
static void order(void)
{
	int low = SIGRTMIN + 1, high = SIGRTMIN + 4;
	log_length = 0;
	for (int s = low; s <= high; s++)
		handle(s, SA_RESTART);
	mask(SIG_BLOCK, low, high);
	for (int i = 0; i < 12; i++)
		CHECK_IS(sigqueue(getpid(), high - i % 4, (union sigval){ .sival_int = i }), 0);
	mask(SIG_UNBLOCK, low, high);
	/* With full masks the handlers run one after the other. */
	CHECK_IS(log_length, 12);
	for (int i = 0; i < 12; i++) {
		CHECK_IS(record[i].signal, low + i / 3);
		CHECK_IS(record[i].value, 3 - i / 3 + i % 3 * 4);
		CHECK_IS(record[i].code, SI_QUEUE);
	}
	/* the same from a child during a wait; all must come, in order */
	log_length = 0;
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		for (int i = 0; i < 40; i++) {
			CHECK_IS(sigqueue(getppid(), low, (union sigval){ .sival_int = i }), 0);
			if (i % 8 == 7)
				rest_ms(10);
		}
		_exit(0);
	}
	for (int i = 0; log_length < 40 && i < 5000; i++)
		rest_ms(2);
	CHECK_IS(log_length, 40);
	for (int i = 0; i < 40; i++) {
		CHECK_IS(record[i].value, i);
		CHECK_IS(record[i].pid, child);
	}
	await_exit(child, 0);
}

static void senders(void)
{
	handle(SIGUSR1, SA_RESTART);
	log_length = 0;
	CHECK_IS(kill(getpid(), SIGUSR1), 0);
	CHECK_IS(raise(SIGUSR1), 0);
	CHECK_IS(syscall(SYS_tkill, getpid(), SIGUSR1), 0);
	CHECK_IS(queue_to_thread(getpid(), getpid(), SIGUSR1, SI_QUEUE, 5), 0);
	CHECK_IS(queue_to_thread(getpid(), getpid(), SIGUSR1, -60, 6), 0); /* a user-defined code */
	CHECK_IS(log_length, 5);
	int codes[] = { SI_USER, SI_TKILL, SI_TKILL, SI_QUEUE, -60 };
	for (int i = 0; i < 5; i++) {
		CHECK_IS(record[i].code, codes[i]);
		CHECK_IS(record[i].pid, getpid());
	}
	CHECK_IS(record[4].value, 6);
	/* other processes may not use codes of the kernel */
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		CHECK_IS(queue_to_thread(getppid(), getppid(), SIGUSR1, SI_USER, 1), -1);
		CHECK_IS(errno, EPERM);
		_exit(0);
	}
	await_exit(child, 0);
	CHECK_IS(kill(getpid(), 65), -1);
	CHECK_IS(errno, EINVAL);
	CHECK_IS(syscall(SYS_tgkill, getpid(), 1, SIGUSR1), -1);
	CHECK_IS(errno, ESRCH);
}

/* To a group: only its members get it; to a zombie: no effect, and no error. */
static void groups(void)
{
	pid_t members[3];
	int told[2];
	CHECK_IS(pipe(told), 0);
	for (int i = 0; i < 3; i++) {
		members[i] = fork();
		CHECK(members[i] >= 0);
		if (members[i] == 0) {
			CHECK_IS(setpgid(0, i ? members[0] : 0), 0);
			seen = 0;
			handle(SIGUSR2, 0);
			mask(SIG_BLOCK, SIGUSR2, SIGUSR2);
			CHECK_IS(write(told[1], "r", 1), 1);
			sigset_t none;
			sigemptyset(&none);
			while (!seen)
				sigsuspend(&none);
			_exit(40 + i);
		}
		char byte;
		CHECK_IS(read(told[0], &byte, 1), 1);
	}
	CHECK_IS(killpg(members[0], 0), 0);
	CHECK_IS(kill(-members[0], SIGUSR2), 0);
	siginfo_t info;
	CHECK_IS(waitid(P_PGID, (id_t)members[0], &info, WEXITED | WNOWAIT), 0);
	await_exit(members[0], 40);
	CHECK_IS(killpg(members[0], SIGCONT), 0); /* the group lives on */
	CHECK_IS(waitid(P_PID, (id_t)members[1], &info, WEXITED | WNOWAIT), 0);
	CHECK_IS(kill(members[1], SIGKILL), 0);
	CHECK_IS(kill(members[1], 0), 0);
	await_exit(members[1], 41);
	await_exit(members[2], 42);
	CHECK_IS(killpg(members[0], 0), -1);
	CHECK_IS(errno, ESRCH);
	close(told[0]), close(told[1]);
}

/* Nested handlers: their masks, SA_NODEFER, SA_RESETHAND, and a jump out of the inner one. */
static volatile sig_atomic_t depth, deepest, trace;
static sigjmp_buf way_out;
static void inner(int signal)
{
	depth++;
	deepest = depth > deepest ? depth : deepest;
	trace = trace * 10 + (signal == SIGUSR1 ? 1 : 2);
	if (signal == SIGUSR1 && depth < 3)
		raise(SIGUSR2); /* not blocked: delivered at once */
	if (depth == 3)
		siglongjmp(way_out, 3);
	if (signal == SIGUSR2 && trace < 1000)
		raise(SIGUSR1);
	trace = trace * 10 + 9;
	depth--;
}

static void nested(void)
{
	struct sigaction action = { .sa_handler = inner };
	CHECK_IS(sigaction(SIGUSR1, &action, NULL) | sigaction(SIGUSR2, &action, NULL), 0);
	depth = deepest = trace = 0;
	raise(SIGUSR1); /* 1, in it 2, which raises 1: blocked until the outer handler ends; then once more */
	CHECK_IS(deepest, 2);
	CHECK_IS(trace, 12991299);
}

static void nested_jump(void)
{
	struct sigaction action = { .sa_handler = inner, .sa_flags = SA_NODEFER };
	CHECK_IS(sigaction(SIGUSR1, &action, NULL) | sigaction(SIGUSR2, &action, NULL), 0);
	depth = deepest = trace = 0;
	int came = sigsetjmp(way_out, 1);
	if (came == 0) {
		raise(SIGUSR1);
		fail("FAIL: nobody jumped\n");
	}
	CHECK_IS(came, 3);
	CHECK_IS(trace, 121);
	sigset_t blocked;
	CHECK_IS(sigprocmask(SIG_BLOCK, NULL, &blocked), 0);
	CHECK(!sigismember(&blocked, SIGUSR1) && !sigismember(&blocked, SIGUSR2));
}

/* The end of a parent is signalled to a child that has requested it. */
static void parents_death(void)
{
	int told[2];
	CHECK_IS(pipe(told), 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		pid_t grandchild = fork();
		CHECK(grandchild >= 0);
		if (grandchild == 0) {
			log_length = 0;
			handle(SIGUSR1, 0);
			mask(SIG_BLOCK, SIGUSR1, SIGUSR1);
			CHECK_IS(prctl(PR_SET_PDEATHSIG, SIGUSR1), 0);
			int asked = 0;
			CHECK_IS(prctl(PR_GET_PDEATHSIG, &asked), 0);
			CHECK_IS(asked, SIGUSR1);
			CHECK_IS(write(told[1], "r", 1), 1);
			sigset_t none;
			sigemptyset(&none);
			sigsuspend(&none);
			CHECK_IS(log_length, 1);
			CHECK_IS(write(told[1], "d", 1), 1);
			_exit(0);
		}
		char byte;
		CHECK_IS(read(told[0], &byte, 1), 1);
		rest_ms(10);
		_exit(3);
	}
	close(told[1]);
	await_exit(child, 3);
	char byte;
	CHECK_IS(read(told[0], &byte, 1), 1);
	CHECK_IS(byte, 'd');
	CHECK_IS(read(told[0], &byte, 1), 0);
	close(told[0]);
}

/* SIGCHLD for stops, or not (SA_NOCLDSTOP); no zombies (SA_NOCLDWAIT). */
static void children(void)
{
	for (int quiet = 0; quiet < 2; quiet++) {
		int status;
		handle(SIGCHLD, quiet ? SA_NOCLDSTOP | SA_RESTART : SA_RESTART);
		log_length = 0;
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			alarm(100);
			for (;;)
				pause();
		}
		for (int i = 0; i < 2; i++) {
			CHECK_IS(kill(child, SIGSTOP), 0);
			CHECK_IS(waitpid(child, &status, WUNTRACED), child);
			CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP);
			CHECK_IS(waitpid(child, &status, WUNTRACED | WNOHANG), 0); /* reported once */
			await_log(quiet ? 0 : 2 * i + 1);
			CHECK_IS(kill(child, SIGCONT), 0);
			CHECK_IS(waitpid(child, &status, WCONTINUED), child);
			CHECK(WIFCONTINUED(status));
			await_log(quiet ? 0 : 2 * i + 2); /* sent when it has woken: a little later */
		}
		int codes[] = { CLD_STOPPED, CLD_CONTINUED, CLD_STOPPED, CLD_CONTINUED };
		for (int i = 0; i < log_length; i++) {
			CHECK_IS(record[i].code, codes[i]);
			CHECK_IS(record[i].pid, child);
		}
		log_length = 0;
		CHECK_IS(kill(child, SIGKILL), 0);
		CHECK_IS(waitpid(child, &status, 0), child);
		CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
		await_log(1);
		CHECK_IS(record[0].code, CLD_KILLED);
	}
	handle(SIGCHLD, SA_NOCLDWAIT | SA_RESTART);
	log_length = 0;
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0)
		_exit(1);
	CHECK_IS(waitpid(child, NULL, 0), -1);
	CHECK_IS(errno, ECHILD);
	await_log(1);
	signal(SIGCHLD, SIG_DFL);
}

static void broken_pipe(void)
{
	int ends[2];
	CHECK_IS(pipe(ends), 0);
	close(ends[0]);
	handle(SIGPIPE, SA_RESETHAND);
	log_length = 0;
	CHECK_IS(write(ends[1], "x", 1), -1);
	CHECK_IS(errno, EPIPE);
	CHECK_IS(log_length, 1);
	struct sigaction now_set;
	CHECK_IS(sigaction(SIGPIPE, NULL, &now_set), 0);
	CHECK(now_set.sa_handler == SIG_DFL);
	signal(SIGPIPE, SIG_IGN);
	CHECK_IS(write(ends[1], "x", 1), -1);
	CHECK_IS(errno, EPIPE);
	signal(SIGPIPE, SIG_DFL);
	mask(SIG_BLOCK, SIGPIPE, SIGPIPE);
	CHECK_IS(write(ends[1], "x", 1), -1);
	sigset_t pending, only;
	sigemptyset(&only), sigaddset(&only, SIGPIPE);
	CHECK_IS(sigpending(&pending), 0);
	CHECK(sigismember(&pending, SIGPIPE));
	struct timespec none = { 0, 0 };
	CHECK_IS(sigtimedwait(&only, NULL, &none), SIGPIPE);
	mask(SIG_UNBLOCK, SIGPIPE, SIGPIPE);
	close(ends[1]);
}

/* A signal for the thread and one of the same number for the process are two. */
static void twice(void)
{
	handle(SIGUSR1, 0);
	for (int i = 0; i < 3; i++) {
		mask(SIG_BLOCK, SIGUSR1, SIGUSR1);
		log_length = 0;
		CHECK_IS(kill(getpid(), SIGUSR1), 0);
		CHECK_IS(syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), SIGUSR1), 0);
		mask(SIG_UNBLOCK, SIGUSR1, SIGUSR1);
		CHECK_IS(log_length, 2);
		CHECK_IS(record[0].code, SI_TKILL);
		CHECK_IS(record[1].code, SI_USER);
	}
}

/* A stack overflow without an alternate stack kills; an alternate stack in use cannot be
 * changed. */
static char *other_stack;
static volatile sig_atomic_t refused;
/* A one-shot handler is reset, and its signal, ignored by default, stays pending while it is blocked. */
static void reset_and_blocked(void)
{
	sigset_t pending;
	handle(SIGWINCH, SA_RESETHAND);
	log_length = 0;
	CHECK_IS(kill(getpid(), SIGWINCH), 0);
	await_log(1);
	mask(SIG_BLOCK, SIGWINCH, SIGWINCH);
	CHECK_IS(kill(getpid(), SIGWINCH), 0);
	rest_ms(20);
	CHECK_IS(sigpending(&pending), 0);
	CHECK(sigismember(&pending, SIGWINCH));
	mask(SIG_UNBLOCK, SIGWINCH, SIGWINCH);
	CHECK_IS(log_length, 1);
}

static void on_other(int signal)
{
	(void)signal;
	stack_t now_used, another = { .ss_sp = other_stack, .ss_size = 65536 };
	CHECK_IS(sigaltstack(NULL, &now_used), 0);
	refused = now_used.ss_flags == SS_ONSTACK && sigaltstack(&another, NULL) == -1 && errno == EPERM;
}
static int overflow(int n)
{
	volatile char block[4096];
	memset((void *)block, n, sizeof block);
	return overflow(n + 1) + block[n & 4095];
}
static void stacks(void)
{
	stack_t own = { .ss_sp = other_stack, .ss_size = 65536 }, off = { .ss_flags = SS_DISABLE };
	CHECK_IS(sigaltstack(&own, NULL), 0);
	struct sigaction action = { .sa_handler = on_other, .sa_flags = SA_ONSTACK };
	CHECK_IS(sigaction(SIGUSR1, &action, NULL), 0);
	refused = 0;
	raise(SIGUSR1);
	CHECK_IS(refused, 1);
	CHECK_IS(sigaltstack(&off, NULL), 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		prctl(PR_SET_DUMPABLE, 0);
		action.sa_handler = on_other;
		sigaction(SIGSEGV, &action, NULL);
		_exit(overflow(0));
	}
	int status;
	CHECK_IS(waitpid(child, &status, 0), child);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

int main(void)
{
	other_stack = malloc(65536);
	do {
		order();
		twice();
		reset_and_blocked();
		senders();
		groups();
		nested();
		nested_jump();
		parents_death();
		children();
		broken_pipe();
		stacks();
	} while (going());
	return pass();
}
