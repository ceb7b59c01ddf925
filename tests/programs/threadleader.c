/* Proves: a process whose first thread has ended is the same process: its pid, its memory, the
 * files that it maps, its threads, and the exit status that its parent gets. */
#include "program.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>

static pthread_t first;
static pid_t process;
/* Memory that a move must find without the first thread. */
static int *shared;

static void *count(void *argument)
{
	for (int i = 0; i < 1000; i++)
		++*(_Atomic int *)argument;
	return argument;
}

static void look_at_own_file(void)
{
	/* For the first thread, which has ended, /proc no longer shows this file. */
	int fd = open("/proc/thread-self/exe", O_RDONLY);
	CHECK(fd >= 0);
	char *at = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0);
	CHECK(at != MAP_FAILED);
	CHECK(memcmp(at, "\177ELF", 4) == 0);
	CHECK_IS(munmap(at, 4096), 0);
	CHECK_IS(close(fd), 0);
}

static void *rest(void *argument)
{
	int rounds = 0;
	CHECK_IS(pthread_join(first, NULL), 0);
	do {
		_Atomic int sum = 0;
		pthread_t thread;
		CHECK_IS(getpid(), process);
		CHECK(syscall(SYS_gettid) != process);
		CHECK_IS(pthread_create(&thread, NULL, count, &sum), 0);
		rest_ms(1);
		CHECK_IS(pthread_join(thread, NULL), 0);
		CHECK_IS(sum, 1000);
		CHECK_IS(*shared, rounds);
		*shared = ++rounds;
		look_at_own_file();
		pid_t child = fork();
		if (child == 0)
			_exit(7);
		int status;
		CHECK_IS(waitpid(child, &status, 0), child);
		CHECK_IS(status, 7 << 8);
	} while (going());
	exit(pass());
	return argument;
}

int main(void)
{
	pthread_t thread;
	process = getpid();
	first = pthread_self();
	shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(shared != MAP_FAILED);
	CHECK_IS(madvise(shared, 4096, MADV_DONTFORK), 0);
	/* If the program is moved at once, it is away by then. */
	if (getenv("TERN_UNTIL"))
		rest_ms(700);
	CHECK_IS(pthread_create(&thread, NULL, rest, NULL), 0);
	pthread_exit(NULL);
}
