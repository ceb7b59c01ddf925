/* Proves: if a process is killed while it forks, its child is not left behind. */
#include "program.h"
#include <pthread.h>
#include <sys/wait.h>

#define KILLS 30
#define THREADS 4

/* Forks for ever. All descendants hold the pipe. */
static void *forks(void *argument)
{
	for (;;) {
		pid_t child = fork();
		if (child == 0)
			_exit(0);
		if (child > 0)
			waitpid(child, NULL, 0);
	}
	return argument;
}

int main(void)
{
	const char *until = getenv("TERN_UNTIL");
	for (int done = 0; done < KILLS || (until && access(until, F_OK) != 0 && done < 12000); done++) {
		int ends[2], status;
		char byte;
		CHECK_IS(pipe(ends), 0);
		pid_t forker = fork();
		if (forker == 0) {
			pthread_t thread;
			for (int i = 1; i < THREADS; i++)
				CHECK_IS(pthread_create(&thread, NULL, forks, NULL), 0);
			forks(NULL);
		}
		CHECK(forker > 0);
		CHECK_IS(close(ends[1]), 0);
		/* At another moment of a fork each time. */
		double begun = now();
		while (now() < begun + 0.02 + done % 10 * 0.0003)
			;
		CHECK_IS(kill(forker, SIGKILL), 0);
		CHECK_IS(waitpid(forker, &status, 0), forker);
		CHECK_IS(status, SIGKILL);
		/* The end of the pipe comes when no descendant is left. */
		CHECK_IS(read(ends[0], &byte, 1), 0);
		CHECK_IS(close(ends[0]), 0);
	}
	return pass();
}
