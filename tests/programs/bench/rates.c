/* rates WHAT [THREADS]: how often a second it does something: getppid, read (4 KiB of a file),
 * write (4 KiB, sequentially through a file of 1 MiB, again and again), fork (and _exit and wait)
 * or exec (posix_spawn of /bin/true, and wait). For each input line all threads do that for a
 * second.
 */
#include "stopwatch.h"
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>

extern char **environ;

static void must(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

static int file;

static void ask(void)
{
	syscall(SYS_getppid);
}

static void take(void)
{
	char page[4096];
	must(pread(file, page, sizeof page, 0) == sizeof page, "pread");
}

static void put(void)
{
	static const char page[4096];
	static unsigned count;
	static int own;
	if (!own) {
		char name[] = "/tmp/rates-XXXXXX";
		own = mkstemp(name);
		must(own > 0 && unlink(name) == 0, name);
	}
	must(pwrite(own, page, sizeof page, (off_t)(count++ % 256) * 4096) == sizeof page, "pwrite");
}

static void has_ended(pid_t child)
{
	int status;
	must(waitpid(child, &status, 0) == child && status == 0, "waitpid");
}

static void split(void)
{
	pid_t child = fork();
	if (child == 0)
		_exit(0);
	must(child > 0, "fork");
	has_ended(child);
}

static void start(void)
{
	pid_t child;
	char *words[] = { "true", NULL };
	must(posix_spawn(&child, "/bin/true", NULL, NULL, words, environ) == 0, "posix_spawn");
	has_ended(child);
}

/* The operations, and how many of each are made between two readings of the clock. */
static const struct work {
	const char *name;
	void (*once)(void);
	int at_once;
} works[] = { { "getppid", ask, 16 }, { "read", take, 16 }, { "write", put, 16 }, { "fork", split, 1 }, { "exec", start, 1 }, { 0 } };

static const struct work *work = works;
static pthread_barrier_t begin, end;
static double begun;
static long done;

static void one_second(void)
{
	long rounds = 0;
	do {
		for (int i = 0; i < work->at_once; i++)
			work->once();
		rounds += work->at_once;
	} while (now() < begun + 1);
	__atomic_add_fetch(&done, rounds, __ATOMIC_RELAXED);
}

static void *helper(void *unused)
{
	for (;;) {
		pthread_barrier_wait(&begin);
		one_second();
		pthread_barrier_wait(&end);
	}
	return unused;
}

int main(int argc, char **argv)
{
	char line[8];
	int threads = argc == 3 ? atoi(argv[2]) : 1;
	while (work->name && (argc < 2 || strcmp(work->name, argv[1])))
		work++;
	if (!work->name || threads < 1)
		return 2;
	file = open("/proc/self/exe", O_RDONLY);
	pthread_barrier_init(&begin, NULL, (unsigned)threads);
	pthread_barrier_init(&end, NULL, (unsigned)threads);
	for (int i = 1; i < threads; i++) {
		pthread_t thread;
		must(pthread_create(&thread, NULL, helper, NULL) == 0, "pthread_create");
	}
	say_pid();
	while (fgets(line, sizeof line, stdin)) {
		done = 0;
		begun = now();
		pthread_barrier_wait(&begin);
		one_second();
		pthread_barrier_wait(&end);
		printf("%.2f\n", (double)done / (now() - begun));
	}
}
