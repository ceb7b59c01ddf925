/* Proves: if another thread executes a program while a fork is under way, the new program can wait
   for the child. */
#include "program.h"
#include <pthread.h>
#include <sys/wait.h>

#define EXECS 30

static char **arguments;
static int done;

static void *executes(void *argument)
{
	char count[16];
	char *words[] = { arguments[0], count, NULL };
	snprintf(count, sizeof count, "%d", done + 1);
	/* At another moment of a fork each time. */
	double begun = now();
	while (now() < begun + done % 10 * 0.0003)
		;
	execv("/proc/self/exe", words);
	fail("FAIL: execv: %s\n", strerror(errno));
	return argument;
}

int main(int argc, char **argv)
{
	pthread_t thread;
	int status;
	arguments = argv;
	done = argc > 1 ? atoi(argv[1]) : 0;
	while (waitpid(-1, &status, 0) > 0)
		CHECK_IS(status, 0);
	CHECK_IS(errno, ECHILD);
	double begun = now();
	while (now() < begun + 0.03)
		;
	const char *until = getenv("TERN_UNTIL");
	if (done >= EXECS && (!until || access(until, F_OK) == 0 || done >= 12000))
		return pass();
	CHECK_IS(pthread_create(&thread, NULL, executes, NULL), 0);
	for (;;) {
		pid_t child = fork();
		if (child == 0)
			_exit(0);
		CHECK_IS(child > 0, 1);
		CHECK_IS(waitpid(child, &status, 0), child);
		CHECK_IS(status, 0);
	}
}
