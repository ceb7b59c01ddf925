/* Proves: execve by a thread other than the first leaves one thread, with the process's pid. */
#include "program.h"
#include <pthread.h>
#include <sys/syscall.h>

static char **arguments;
static char count[16], pid[16];

static void *idle(void *argument)
{
	for (;;)
		pause();
	return argument;
}

static void *executes(void *argument)
{
	char *words[] = { arguments[0], count, pid, NULL };
	execv("/proc/self/exe", words);
	fail("FAIL: execv: %s\n", strerror(errno));
	return argument;
}

int main(int argc, char **argv)
{
	pthread_t threads[2];
	arguments = argv;
	int done = argc > 1 ? atoi(argv[1]) : 0;
	if (argc > 2) {
		CHECK_IS(getpid(), atoi(argv[2]));
		CHECK_IS(syscall(SYS_gettid), getpid());
	}
	double begun = now();
	while (now() < begun + 0.05)
		;
	const char *until = getenv("TERN_UNTIL");
	if (done >= 20 && (!until || access(until, F_OK) == 0 || done >= 12000))
		return pass();
	snprintf(count, sizeof count, "%d", done + 1);
	snprintf(pid, sizeof pid, "%d", getpid());
	CHECK_IS(pthread_create(&threads[0], NULL, idle, NULL), 0);
	CHECK_IS(pthread_create(&threads[1], NULL, executes, NULL), 0);
	for (;;)
		pause();
}
