/* blocked read|poll|compute THREADS: a child whose threads wait in a call for a byte of their
 * pipes, or compute, and which is to be moved; its parent stays. For each input line, the parent
 * sends for one second a signal with a handler to all threads at once, and again when all of them
 * are back in their calls. Then it sends each thread its byte, fails if a thread does not get it,
 * and prints the number of signals per second.
 */
#include "stopwatch.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

enum { MOST = 100 };

static int threads, kind, call;
/* The pipe of each thread; and the pipe on which threads send their ids, and then what happened to
 * them. */
static int bytes[MOST][2], tids[2], said[2];

static void must(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

static void say(char what)
{
	must(write(said[1], &what, 1) == 1, "write");
}

/* The next `times` reports must all be this one. */
static void hear(char what, int times)
{
	for (char got; times > 0; times--) {
		must(read(said[0], &got, 1) == 1, "read");
		if (got != what) {
			printf("it said %c, not %c\n", got, what);
			exit(1);
		}
	}
}

static void signalled(int number)
{
	int before = errno;
	(void)number;
	say('s');
	errno = before;
}

static void *wait_there(void *argument)
{
	int number = (int)(long)argument, tid = (int)syscall(SYS_gettid);
	/* With the thread's number, so that the parent can tell the threads apart. */
	must(write(tids[1], (int[]){ number, tid }, 2 * sizeof(int)) == 2 * sizeof(int), "write");
	for (volatile long spun = 0; kind == 'c';)
		spun++;
	for (;;) {
		char byte;
		struct pollfd readable = { bytes[number][0], POLLIN, 0 };
		/* The kernel never restarts a poll, whatever the handler's flags are. */
		while (kind == 'p' && poll(&readable, 1, -1) < 0)
			must(errno == EINTR, "poll");
		/* The read is restarted, and does not fail with EINTR. */
		must(read(bytes[number][0], &byte, 1) == 1, "read");
		say('b');
	}
	return argument;
}

static void child(void)
{
	struct sigaction action = { .sa_handler = signalled, .sa_flags = SA_RESTART };
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	sigaction(SIGUSR1, &action, NULL);
	for (long i = 1; i < threads; i++) {
		pthread_t thread;
		must(pthread_create(&thread, NULL, wait_there, (void *)i) == 0, "pthread_create");
	}
	wait_there(NULL);
}

/* Waits until a thread is in its call, according to home's kernel; if the thread is away, until its
 * deputy thread is in the call. */
static void is_blocked(int syscall_file)
{
	for (int looks = 0;; looks++) {
		char text[128] = "";
		must(pread(syscall_file, text, sizeof text - 1, 0) > 0, "/proc/PID/task/TID/syscall");
		if (text[0] != 'r' && atoi(text) == call)
			return;
		/* Polling uses CPU time of the node, so it is kept rare. */
		if (looks < 10)
			sched_yield();
		else
			nanosleep(&(struct timespec){ 0, 20000 }, NULL);
	}
}

int main(int argc, char **argv)
{
	char line[64];
	int tid[MOST], file[MOST];
	threads = argc == 3 ? atoi(argv[2]) : 0;
	kind = argc == 3 ? argv[1][0] : 0;
	call = kind == 'p' ? SYS_poll : SYS_read;
	if (threads < 1 || threads > MOST || !strchr("rpc", kind) || pipe(tids) || pipe(said))
		return 2;
	for (int i = 0; i < threads; i++)
		must(pipe(bytes[i]) == 0, "pipe");
	pid_t pid = fork();
	if (pid == 0)
		child();
	for (int i = 0, one[2]; i < threads; i++) {
		must(read(tids[0], one, sizeof one) == sizeof one, "read");
		tid[one[0]] = one[1];
		snprintf(line, sizeof line, "/proc/%d/task/%d/syscall", (int)pid, one[1]);
		file[one[0]] = open(line, O_RDONLY | O_CLOEXEC);
		must(file[one[0]] >= 0, line);
	}
	prctl(PR_SET_TIMERSLACK, 1);
	setvbuf(stdout, NULL, _IOLBF, 0);
	printf("pid %d\n", (int)pid);
	while (fgets(line, sizeof line, stdin)) {
		long sent = 0;
		double begun = now();
		do {
			for (int i = 0; i < threads; i++)
				is_blocked(file[i]);
			for (int i = 0; i < threads; i++)
				must(syscall(SYS_tgkill, pid, tid[i], SIGUSR1) == 0, "tgkill");
			hear('s', threads);
			sent += threads;
		} while (now() < begun + 1);
		double rate = (double)sent / (now() - begun);
		for (int i = 0; i < threads; i++)
			must(write(bytes[i][1], "", 1) == 1, "write");
		hear('b', threads);
		printf("%.2f\n", rate);
	}
}
