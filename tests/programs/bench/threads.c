/* threads COUNT: threads in step, every tenth of them with a call in each step, until the program
 * is killed. */
#include "stopwatch.h"
#include <pthread.h>
#include <stdint.h>
#include <sys/syscall.h>

static pthread_barrier_t together;

static void *step(void *argument)
{
	for (;;) {
		pthread_barrier_wait(&together);
		if ((intptr_t)argument % 10 == 0)
			syscall(SYS_getppid);
		pthread_barrier_wait(&together);
	}
	return argument;
}

int main(int argc, char **argv)
{
	intptr_t count = argc == 2 ? atol(argv[1]) : 0;
	pthread_attr_t small;
	if (count < 1 || pthread_attr_init(&small) || pthread_attr_setstacksize(&small, 128 << 10) ||
	    pthread_barrier_init(&together, NULL, (unsigned)count))
		return 2;
	/* The main thread is one of them. */
	for (intptr_t i = 1; i < count; i++) {
		pthread_t thread;
		if (pthread_create(&thread, &small, step, (void *)i))
			return 2;
	}
	say_pid();
	printf("ready\n");
	for (;;) {
		pthread_barrier_wait(&together);
		pthread_barrier_wait(&together);
		nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
	}
}
