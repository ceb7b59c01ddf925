/* Proves: a child or thread that the kernel refuses leaves no trace: the call fails with the kernel's error, no thread
 * finds a child to wait for, no signal and no descriptor is left, and signals and ends of other children are kept.
 * Forks are refused because a mapping is larger than the machine's memory, which needs vm.overcommit_memory=0; with
 * another setting nothing is checked. With "tasks", the number of tasks must be limited before a line arrives, until
 * the input is closed. With "parent", the child would be a sibling; with "others", another child ends. With
 * "spawners", nothing is refused, and forks of other threads do not delay a wait. */
#include "program.h"
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/time.h>

extern char **environ;
static atomic_int ends, alarms, stop, spawned;
static pid_t session;
static size_t size;
static char *hidden;

static void on_end(int signal UNUSED) { ends++; }
static void on_alarm(int signal UNUSED)
{
	/* The result of a call in a handler is its own. */
	int error = errno;
	if (syscall(SYS_getsid, 0) != session || syscall(SYS_fcntl, -1, F_GETFD) != -1 || errno != EBADF)
		fail("a call in a handler had another result\n");
	alarms++;
	struct itimerval once = { { 0, 0 }, { 0, 2000 } };
	if (!stop)
		setitimer(ITIMER_REAL, &once, NULL);
	errno = error;
}
static void *nothing(void *unused) { return unused; }

static void handle(int signal, void (*handler)(int), int flags)
{
	struct sigaction action = { .sa_handler = handler, .sa_flags = flags };
	CHECK_IS(sigaction(signal, &action, NULL), 0);
}

static bool is_memory_checked(void)
{
	char setting = 0;
	int fd = open("/proc/sys/vm/overcommit_memory", O_RDONLY);
	CHECK(fd >= 0 && read(fd, &setting, 1) == 1);
	close(fd);
	return setting == '0';
}

/* One expiry after another; the next one begins when the handler has run, so that calls are made between them. */
static void start_alarms(void)
{
	struct itimerval once = { { 0, 0 }, { 0, 2000 } };
	stop = 0;
	CHECK_IS(setitimer(ITIMER_REAL, &once, NULL), 0);
}

static void stop_alarms(void)
{
	struct itimerval never = { 0 };
	stop = 1;
	CHECK_IS(setitimer(ITIMER_REAL, &never, NULL), 0);
}

/* Runs a check in another thread, while this one waits in a call that lasts. */
static void (*checked)(void);
static int done[2];
static void *run_checked(void *unused UNUSED)
{
	checked();
	CHECK(write(done[1], "", 1) == 1);
	return NULL;
}
static void in_other_thread(void (*check)(void))
{
	pthread_t thread;
	char byte;
	checked = check;
	CHECK_IS(pipe(done), 0);
	CHECK_IS(pthread_create(&thread, NULL, run_checked, NULL), 0);
	CHECK_IS(read(done[0], &byte, 1), 1);
	CHECK_IS(pthread_join(thread, NULL), 0);
	close(done[0]), close(done[1]);
}

/* Maps more than the machine has, in one area: the kernel checks each mapping alone, and joins neighbours. */
static void map_too_much(void)
{
	struct sysinfo info;
	CHECK_IS(sysinfo(&info), 0);
	size_t all = (info.totalram + info.totalswap) * info.mem_unit, piece = 1ul << 30;
	size = all / piece * piece + 2 * piece;
	hidden = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	CHECK(hidden != MAP_FAILED);
	for (size_t at = 0; at < size; at += piece)
		CHECK(mmap(hidden + at, piece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
		      hidden + at);
}

static void unmap(void) { CHECK_IS(munmap(hidden, size), 0); }

static void refused(unsigned long flags, int *word)
{
	int before = dup(0);
	long child = syscall(SYS_clone, flags, 0, word, 0, 0);
	if (child == 0)
		_exit(0);
	CHECK(child == -1 && errno == ENOMEM);
	CHECK(waitpid(-1, NULL, __WALL | WNOHANG) == -1 && errno == ECHILD);
	CHECK_IS(close(before), 0);
	CHECK_IS(dup(0), before);
	CHECK_IS(close(before), 0);
	CHECK_IS(ends, 0);
}

/* A signal that was pending before the fork stays pending, and no other one is. */
static void check_blocked(void)
{
	sigset_t set, pending, before;
	siginfo_t info;
	struct timespec none = { 0 };
	sigemptyset(&set), sigaddset(&set, SIGCHLD), sigaddset(&set, SIGUSR1), sigaddset(&set, SIGRTMIN + 5);
	CHECK_IS(pthread_sigmask(SIG_BLOCK, &set, &before), 0);
	refused(SIGCHLD, NULL), refused(SIGUSR1, NULL), refused((unsigned long)SIGRTMIN + 5, NULL);
	CHECK_IS(sigpending(&pending), 0);
	CHECK(!sigismember(&pending, SIGCHLD) && !sigismember(&pending, SIGUSR1) && !sigismember(&pending, SIGRTMIN + 5));
	CHECK_IS(sigqueue(getpid(), SIGCHLD, (union sigval){ .sival_int = 7 }), 0);
	CHECK_IS(sigqueue(getpid(), SIGRTMIN + 5, (union sigval){ .sival_int = 8 }), 0);
	CHECK_IS(kill(getpid(), SIGRTMIN + 5), 0);
	refused(SIGCHLD, NULL), refused((unsigned long)SIGRTMIN + 5, NULL);
	for (int i = 7; i < 9; i++) {
		CHECK(sigtimedwait(&set, &info, &none) > 0);
		CHECK(info.si_code == SI_QUEUE && info.si_value.sival_int == i);
	}
	CHECK_IS(sigtimedwait(&set, &info, &none), SIGRTMIN + 5);
	CHECK(info.si_code == SI_USER && info.si_pid == getpid());
	CHECK(sigtimedwait(&set, &info, &none) == -1 && errno == EAGAIN);
	CHECK_IS(pthread_sigmask(SIG_SETMASK, &before, NULL), 0);
}

static void check_blocked_in_other_thread(void)
{
	sigset_t set, before;
	sigemptyset(&set), sigaddset(&set, SIGCHLD), sigaddset(&set, SIGUSR1), sigaddset(&set, SIGRTMIN + 5);
	CHECK_IS(pthread_sigmask(SIG_BLOCK, &set, &before), 0);
	in_other_thread(check_blocked);
	CHECK_IS(pthread_sigmask(SIG_SETMASK, &before, NULL), 0);
}

/* Another child ends just then: its status and its signal are kept. */
static void check_other_child(void)
{
	int begin[2], status;
	char byte;
	CHECK_IS(pipe(begin), 0);
	pid_t other = fork();
	CHECK(other >= 0);
	if (other == 0) {
		close(begin[1]);
		_exit(read(begin[0], &byte, 1) == 1 ? 5 : 6);
	}
	map_too_much();
	CHECK(write(begin[1], "", 1) == 1);
	pid_t child = fork();
	if (child == 0)
		_exit(0);
	CHECK(child == -1 && errno == ENOMEM);
	CHECK_IS(waitpid(-1, &status, 0), other);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 5);
	while (ends == 0)
		sched_yield();
	CHECK_IS(ends, 1);
	ends = 0;
	refused(SIGCHLD, NULL);
	close(begin[0]), close(begin[1]);
	unmap();
}

static void *poll_children(void *unused UNUSED)
{
	siginfo_t info;
	while (!stop) {
		pid_t child = waitpid(-1, NULL, WNOHANG);
		if (child != -1 || errno != ECHILD)
			fail("WNOHANG: %d, errno %d\n", child, errno);
		info.si_pid = -3;
		int found = waitid(P_ALL, 0, &info, WNOHANG | WEXITED);
		if (found != -1 || errno != ECHILD)
			fail("waitid: %d, errno %d, child %d\n", found, errno, info.si_pid);
	}
	return NULL;
}

static void *await_children(void *unused UNUSED)
{
	while (!stop) {
		pid_t child = wait(NULL);
		if (child != -1 || errno != ECHILD)
			fail("wait: %d\n", child);
	}
	return NULL;
}

/* No wait of another thread finds the child, and no call of another thread is disturbed. */
static void check_other_threads(void)
{
	static void *(*const run[])(void *) = { poll_children, await_children };
	pthread_t threads[2];
	stop = 0;
	for (int i = 0; i < 2; i++)
		CHECK_IS(pthread_create(&threads[i], NULL, run[i], NULL), 0);
	for (int i = 0; i < 4; i++) {
		pid_t child = fork();
		if (child == 0)
			_exit(0);
		CHECK(child == -1 && errno == ENOMEM);
	}
	stop = 1;
	for (int i = 0; i < 2; i++)
		CHECK_IS(pthread_join(threads[i], NULL), 0);
	CHECK_IS(ends, 0);
}

static void check_alarms(void)
{
	start_alarms();
	for (int i = 0; i < 4; i++)
		refused(SIGCHLD, NULL);
	stop_alarms();
}

static void refused_for_memory(void)
{
	int word = -7;
	refused(SIGCHLD, NULL);
	refused(CLONE_PIDFD | SIGCHLD, &word);
	word = -7;
	refused(CLONE_PARENT_SETTID | SIGCHLD, &word);
	CHECK_IS(word, -7);
	refused(CLONE_FILES | CLONE_FS | SIGCHLD, NULL);
	refused(0, NULL), refused(SIGUSR1, NULL);
	handle(SIGCHLD, SIG_IGN, 0);
	refused(SIGCHLD, NULL);
	handle(SIGCHLD, on_end, SA_NOCLDWAIT);
	refused(SIGCHLD, NULL);
	handle(SIGCHLD, SIG_DFL, 0);
	refused(SIGCHLD, NULL);
	handle(SIGCHLD, on_end, SA_RESTART);
	check_blocked();
	check_blocked_in_other_thread();
	check_alarms();
	check_other_threads();
}

static void refused_for_tasks(void)
{
	char line[64], text[4096], *arguments[] = { "true", NULL };
	pthread_t thread;
	pid_t child;
	puts("ready"), fflush(stdout);
	CHECK(fgets(line, sizeof line, stdin) != NULL);
	struct pollfd input = { .fd = 0, .events = POLLIN };
	start_alarms();
	do {
		for (int i = 0; i < 8; i++)
			CHECK(fork() == -1 && errno == EAGAIN);
		child = vfork();
		if (child == 0)
			_exit(0);
		CHECK(child == -1 && errno == EAGAIN);
		CHECK_IS(posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environ), EAGAIN);
		CHECK_IS(pthread_create(&thread, NULL, nothing, NULL), EAGAIN);
		CHECK(wait(NULL) == -1 && errno == ECHILD);
		CHECK_IS(ends, 0);
		int status = open("/proc/self/status", O_RDONLY);
		ssize_t n = read(status, text, sizeof text - 1);
		CHECK(n > 0);
		text[n] = 0;
		close(status);
		CHECK(strstr(text, "\nThreads:\t1\n"));
	} while (going() || poll(&input, 1, 0) == 0);
	stop_alarms();
	CHECK(alarms > 0);
}

static void check_other_children(void)
{
	check_other_child();
	in_other_thread(check_other_child);
}

static void *spawn(void *unused UNUSED)
{
	while (!stop) {
		pid_t child = fork();
		if (child == 0)
			_exit(0);
		CHECK(child > 0);
		spawned++;
	}
	return NULL;
}

/* Other threads fork all the time: a wait that does not block returns soon nevertheless, because a child runs. */
static void check_spawners(void)
{
	enum { THREADS = 10, WAITS = 30, FORKS_PER_WAIT = 6 };
	pthread_t threads[THREADS];
	int end[2], before;
	char byte;
	handle(SIGCHLD, SIG_IGN, 0);
	CHECK_IS(pipe(end), 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		close(end[1]);
		_exit((int)read(end[0], &byte, 1));
	}
	stop = 0;
	for (int i = 0; i < THREADS; i++)
		CHECK_IS(pthread_create(&threads[i], NULL, spawn, NULL), 0);
	before = spawned;
	for (int i = 0; i < WAITS; i++) {
		siginfo_t info = { 0 };
		CHECK_IS(waitpid(-1, NULL, WNOHANG), 0);
		CHECK_IS(waitid(P_ALL, 0, &info, WNOHANG | WEXITED), 0);
		CHECK_IS(info.si_pid, 0);
		CHECK_IS(waitpid(child, NULL, WNOHANG), 0);
	}
	CHECK(spawned - before < WAITS * FORKS_PER_WAIT);
	stop = 1;
	for (int i = 0; i < THREADS; i++)
		CHECK_IS(pthread_join(threads[i], NULL), 0);
	close(end[0]), close(end[1]);
	CHECK(wait(NULL) == -1 && errno == ECHILD);
	handle(SIGCHLD, on_end, SA_RESTART);
}

/* The child of a child would be this process's. */
static void refused_sibling(void)
{
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		map_too_much();
		for (int i = 0; i < 5; i++) {
			long sibling = syscall(SYS_clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0);
			if (sibling == 0)
				_exit(0);
			CHECK(sibling == -1 && errno == ENOMEM);
		}
		_exit(3);
	}
	int status;
	CHECK_IS(wait(&status), child);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 3);
	CHECK(wait(NULL) == -1 && errno == ECHILD);
	CHECK_IS(ends, 1);
	ends = 0;
}

int main(int argc, char **argv)
{
	session = getsid(0);
	handle(SIGCHLD, on_end, SA_RESTART);
	handle(SIGUSR1, on_end, SA_RESTART);
	handle(SIGRTMIN + 5, on_end, SA_RESTART);
	handle(SIGALRM, on_alarm, SA_RESTART);
	void (*check)(void) = argc == 1			       ? refused_for_memory :
			      strcmp(argv[1], "others") == 0   ? check_other_children :
			      strcmp(argv[1], "spawners") == 0 ? check_spawners :
			      strcmp(argv[1], "parent") == 0   ? refused_sibling :
								 refused_for_tasks;
	if (check != refused_for_tasks && check != check_spawners && !is_memory_checked())
		return pass();
	if (argc == 1)
		map_too_much();
	do {
		check();
	} while (check != refused_for_tasks && going());
	return pass();
}
