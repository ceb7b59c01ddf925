/* Proves: a program that executes itself again and again, in the same process, with its state in
 * arguments, environment, an inherited descriptor, ignored signals and the blocked mask. */
#include "program.h"

extern char **environ;

int main(int argc, char **argv)
{
	static char stamp[64], pid[32], number[32], sum_text[32];
	uint64_t count = 0, sum = 0;
	sigset_t mask;
	if (argc < 4) {
		double seconds = getenv("TERN_SECONDS") ? atof(getenv("TERN_SECONDS")) : 2;
		snprintf(stamp, sizeof stamp, "%.6f", now() + seconds);
		snprintf(pid, sizeof pid, "%d", (int)getpid());
		setenv("CHAIN_UNTIL", stamp, 1);
		setenv("CHAIN_PID", pid, 1);
		int ends[2];
		CHECK(pipe(ends) == 0 && dup2(ends[0], 60) == 60 && dup2(ends[1], 61) == 61);
		CHECK_IS(fcntl(ends[0], F_SETFD, FD_CLOEXEC), 0);
		CHECK_IS(fcntl(ends[1], F_SETFD, FD_CLOEXEC), 0);
		signal(SIGUSR1, SIG_IGN);
		signal(SIGUSR2, (void (*)(int))_exit);
		sigemptyset(&mask), sigaddset(&mask, SIGHUP);
		sigprocmask(SIG_SETMASK, &mask, NULL);
	} else {
		count = strtoull(argv[1], NULL, 10), sum = strtoull(argv[2], NULL, 10);
		CHECK(strcmp(argv[3], "and \"no\" more") == 0);
		CHECK_IS(getpid(), atoi(getenv("CHAIN_PID")));
		uint64_t sent;
		CHECK_IS(read(60, &sent, sizeof sent), sizeof sent);
		CHECK(sent == sum);
		CHECK_IS(sum, count * (count + 1) / 2);
		struct sigaction was;
		CHECK(sigaction(SIGUSR1, NULL, &was) == 0 && was.sa_handler == SIG_IGN);
		CHECK(sigaction(SIGUSR2, NULL, &was) == 0 && was.sa_handler == SIG_DFL);
		CHECK_IS(sigprocmask(SIG_BLOCK, NULL, &mask), 0);
		CHECK(sigismember(&mask, SIGHUP) && !sigismember(&mask, SIGTERM));
	}
	/* some work, so that moves also happen in the middle of a program */
	volatile uint64_t work = 0;
	for (int i = 0; i < 2000000; i++)
		work += (uint64_t)i;
	if (count >= 5 && now() > atof(getenv("CHAIN_UNTIL"))) {
		const char *until = getenv("TERN_UNTIL");
		if (!until || access(until, F_OK) == 0 || now() > atof(getenv("CHAIN_UNTIL")) + 120)
			return pass();
	}
	count++, sum += count;
	CHECK_IS(write(61, &sum, sizeof sum), sizeof sum);
	snprintf(number, sizeof number, "%llu", (unsigned long long)count);
	snprintf(sum_text, sizeof sum_text, "%llu", (unsigned long long)sum);
	execl("/proc/self/exe", "execchain", number, sum_text, "and \"no\" more", NULL);
	fail("FAIL: execve: %s\n", strerror(errno));
}
