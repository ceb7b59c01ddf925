/* Proves: ten thousand descriptors at once: opened, polled, counted in /proc, inherited, closed
 * by ranges; and the limit of their number. */
#include "program.h"
#include <dirent.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#define MANY 10000

static int range(unsigned first, unsigned last, unsigned flags)
{
	return (int)syscall(SYS_close_range, first, last, flags);
}

static int count(void)
{
	DIR *d = opendir("/proc/self/fd");
	CHECK(d != NULL);
	int n = 0;
	for (struct dirent *e; (e = readdir(d));)
		n += e->d_name[0] != '.';
	closedir(d);
	return n - 1; /* the folder itself */
}

int main(void)
{
	struct rlimit limit;
	CHECK_IS(getrlimit(RLIMIT_NOFILE, &limit), 0);
	rlim_t wanted = MANY + 100;
	if (limit.rlim_max < wanted)
		fail("FAIL: only %lld descriptors are allowed here\n", (long long)limit.rlim_max);
	limit.rlim_cur = wanted;
	CHECK_IS(setrlimit(RLIMIT_NOFILE, &limit), 0);
	CHECK_IS(range(3, ~0u, 0), 0); /* close inherited descriptors */
	int first = dup(0), fds[4];
	CHECK(first > 0);
	close(first);
	do {
		int before = count(), set, event = eventfd(0, 0);
		CHECK_IS(event, first);
		for (int i = 1; i < MANY; i++)
			CHECK_IS(dup(event), first + i);
		CHECK_IS(count(), before + MANY);
		CHECK_IS(fcntl(event, F_DUPFD, (int)wanted), -1);
		CHECK_IS(errno, EINVAL);
		CHECK_IS(fcntl(event, F_DUPFD, first + MANY), first + MANY);
		CHECK_IS(dup3(event, (int)wanted - 1, O_CLOEXEC), (int)wanted - 1);
		CHECK_IS(dup2(event, (int)wanted), -1);
		CHECK_IS(errno, EBADF);
		CHECK_IS(dup3(event, event, 0), -1);
		CHECK_IS(errno, EINVAL);
		set = epoll_create1(0);
		CHECK_IS(set, first + MANY + 1);
		struct epoll_event e = { EPOLLIN, { .fd = first + MANY - 1 } }, got;
		CHECK_IS(epoll_ctl(set, EPOLL_CTL_ADD, first + MANY - 1, &e), 0);
		static struct pollfd p[MANY];
		for (int i = 0; i < MANY; i++)
			p[i] = (struct pollfd){ first + i, POLLIN, 0 };
		CHECK_IS(poll(p, MANY, 0), 0);
		CHECK_IS(eventfd_write(first + MANY / 2, 5), 0);
		CHECK_IS(poll(p, MANY, -1), MANY);
		CHECK_IS(p[MANY - 1].revents, POLLIN);
		CHECK_IS(epoll_wait(set, &got, 1, -1), 1);
		CHECK_IS(got.data.fd, first + MANY - 1);
		/* a child has all of them, and closes its own copies */
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			eventfd_t value;
			CHECK_IS(eventfd_read(first + 9000, &value), 0);
			CHECK_IS(value, 5);
			CHECK_IS(range((unsigned)first, ~0u, 0), 0);
			CHECK_IS(dup(0), first);
			_exit(8);
		}
		await_exit(child, 8);
		CHECK_IS(poll(p, MANY, 0), 0);
		CHECK_IS(range((unsigned)first + 10, (unsigned)first + 19, 0), 0);
		CHECK_IS(fcntl(first + 10, F_GETFD), -1);
		CHECK_IS(fcntl(first + 20, F_GETFD), 0);
		CHECK_IS(pipe(fds) | pipe(fds + 2), 0);
		CHECK(fds[0] == first + 10 && fds[3] == first + 13); /* the lowest free numbers */
		CHECK_IS(range((unsigned)first + 10, (unsigned)first + 10, 4 /* CLOSE_RANGE_CLOEXEC */), 0);
		CHECK_IS(fcntl(first + 10, F_GETFD), FD_CLOEXEC);
		CHECK_IS(fcntl(first + 11, F_GETFD), 0);
		CHECK_IS(range(20, 10, 0), -1);
		CHECK_IS(errno, EINVAL);
		CHECK_IS(range((unsigned)first, ~0u, 0), 0);
		CHECK_IS(count(), before);
		/* no more than the limit */
		limit.rlim_cur = (rlim_t)first + 2;
		CHECK_IS(setrlimit(RLIMIT_NOFILE, &limit), 0);
		CHECK_IS(pipe(fds), 0);
		CHECK_IS(dup(0), -1);
		CHECK_IS(errno, EMFILE);
		CHECK_IS(pipe(fds + 2), -1);
		CHECK_IS(errno, EMFILE);
		CHECK_IS(close(fds[0]) | close(fds[1]), 0);
		limit.rlim_cur = wanted;
		CHECK_IS(setrlimit(RLIMIT_NOFILE, &limit), 0);
		rest_ms(300); /* a process that only makes forwarded calls would be sent home */
	} while (going());
	return pass();
}
