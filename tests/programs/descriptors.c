/* Proves: dup, dup2, dup3, F_DUPFD, close-on-exec, close_range and inheritance over fork: one
 * descriptor table, that of home. Threads, children and moves need none of its numbers. */
#include "program.h"
#include <pthread.h>
#include <sys/resource.h>

static void *same(void *argument) { return argument; }

/* Creates a thread and a child while no descriptor is free. */
static void use_all_descriptors(void)
{
	enum { MOST = 40 };
	struct rlimit usual, few;
	CHECK_IS(getrlimit(RLIMIT_NOFILE, &usual), 0);
	few = (struct rlimit){ MOST, usual.rlim_max };
	CHECK_IS(setrlimit(RLIMIT_NOFILE, &few), 0);
	int copies[MOST], count = 0;
	while ((copies[count] = dup(1)) >= 0)
		count++;
	CHECK_IS(errno, EMFILE);
	pthread_t thread;
	CHECK_IS(pthread_create(&thread, NULL, same, NULL), 0);
	CHECK_IS(pthread_join(thread, NULL), 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		CHECK_IS(dup(1), -1);
		_exit(0);
	}
	await_exit(child, 0);
	rest_ms(5);
	CHECK_IS(dup(1), -1);
	CHECK_IS(getrlimit(RLIMIT_NOFILE, &few), 0);
	CHECK_IS(few.rlim_cur, MOST);
	while (count > 0)
		CHECK_IS(close(copies[--count]), 0);
	CHECK_IS(setrlimit(RLIMIT_NOFILE, &usual), 0);
}

int main(void)
{
	enter_scratch();
	do {
		int fd = open("d", O_RDWR | O_CREAT | O_TRUNC, 0600);
		CHECK(fd >= 0);
		int copy = dup(fd), high = fcntl(fd, F_DUPFD_CLOEXEC, 100);
		CHECK(copy > fd && high == 100);
		CHECK_IS(fcntl(high, F_GETFD), FD_CLOEXEC);
		CHECK_IS(fcntl(copy, F_GETFD), 0);
		CHECK_IS(dup2(fd, 50), 50);
		CHECK_IS(dup3(fd, 51, O_CLOEXEC), 51);
		CHECK_IS(fcntl(51, F_GETFD), FD_CLOEXEC);
		CHECK_IS(write(50, "fifty", 5), 5);
		CHECK_IS(lseek(high, 0, SEEK_CUR), 5);
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			CHECK_IS(write(51, " child", 6), 6);
			CHECK_IS(close(50), 0);
			CHECK_IS(write(50, "", 1), -1);
			_exit(0);
		}
		await_exit(child, 0);
		CHECK_IS(write(50, " parent", 7), 7); /* the child closed its own copy */
		char text[32];
		CHECK_IS(pread(fd, text, sizeof text, 0), 18);
		CHECK(memcmp(text, "fifty child parent", 18) == 0);
		CHECK_IS(fcntl(fd, F_SETFL, O_APPEND | O_NONBLOCK), 0);
		CHECK_IS(fcntl(copy, F_GETFL) & (O_APPEND | O_NONBLOCK), O_APPEND | O_NONBLOCK);
		CHECK_IS(close(fd) | close(copy) | close(high) | close(50) | close(51), 0);
		CHECK_IS(fcntl(50, F_GETFD), -1);
		CHECK_IS(errno, EBADF);
		/* the lowest free number is used next */
		int low = open("d", O_RDONLY);
		CHECK_IS(low, fd);
		close(low);
		CHECK_IS(fcntl(12345, F_GETFD), -1);
		use_all_descriptors();
	} while (going());
	CHECK_IS(unlink("d"), 0);
	leave_scratch();
	return pass();
}
