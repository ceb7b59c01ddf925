/* Proves: calls that never wait never fail with EINTR, however many signals without SA_RESTART
 * come just as they begin; and an interrupted sleep reports the remaining time. */
#include "program.h"
#include <sys/time.h>

static volatile sig_atomic_t came;
static void on(int signal)
{
	(void)signal;
	came++;
}

int main(void)
{
	struct sigaction action = { .sa_handler = on };
	CHECK_IS(sigaction(SIGALRM, &action, NULL), 0);
	struct itimerval often = { { 0, 700 }, { 0, 700 } };
	timer_t timer;
	CHECK_IS(timer_create(CLOCK_MONOTONIC, &(struct sigevent){ .sigev_notify = SIGEV_NONE }, &timer), 0);
	CHECK_IS(setitimer(ITIMER_REAL, &often, NULL), 0);
	do {
		struct itimerspec spec;
		struct stat status;
		char name[256];
		for (int i = 0; i < 20; i++) {
			CHECK_IS(timer_gettime(timer, &spec), 0);
			CHECK_IS(lseek(-1, 0, SEEK_SET), -1);
			CHECK_IS(errno, EBADF);
			CHECK_IS(stat("/", &status), 0);
			CHECK(getcwd(name, sizeof name) == name);
			CHECK(getpgid(0) >= 0);
			struct sigaction known;
			CHECK_IS(sigaction(SIGALRM, NULL, &known), 0);
			CHECK(known.sa_handler == on);
		}
		struct timespec whole = { 0, 3000000 }, left = { 77, 77 };
		if (nanosleep(&whole, &left) != 0) {
			CHECK_IS(errno, EINTR);
			/* the remaining time counts to the latest time at which the kernel may wake
			 * the thread: 50 us later */
			if (left.tv_sec != 0 || left.tv_nsec > whole.tv_nsec + 60000)
				fail("FAIL of 3 ms %ld.%09ld s were left\n", left.tv_sec, left.tv_nsec);
		}
	} while (going());
	/* a slow machine may have merged most of them, but not all */
	CHECK(came > 0);
	return pass();
}
