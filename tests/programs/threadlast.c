/* Proves: the first thread may end before the others, and any thread may end the process. */
#include "program.h"
#include <pthread.h>
#include <sys/syscall.h>

static pthread_t first;

static void *last(void *argument)
{
	CHECK_IS(pthread_join(first, NULL), 0);
	for (int i = 0; i < 50; i++) {
		CHECK(syscall(SYS_gettid) != getpid());
		rest_ms(1);
	}
	exit(pass());
	return argument;
}

int main(void)
{
	pthread_t thread;
	while (going())
		rest_ms(1);
	first = pthread_self();
	CHECK_IS(pthread_create(&thread, NULL, last, NULL), 0);
	pthread_exit(NULL);
}
