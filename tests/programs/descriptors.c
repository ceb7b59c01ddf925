/* Proves: dup, dup2, dup3, F_DUPFD, close-on-exec, close_range and inheritance over fork: one
 * descriptor table, that of home. */
#include "program.h"

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
	} while (going());
	CHECK_IS(unlink("d"), 0);
	leave_scratch();
	return pass();
}
