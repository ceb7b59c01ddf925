/* Proves: no real-time signal that was accepted is lost, however many are sent at once. Its child sends it thousands.
 * With the argument "count" it counts SIGRTMIN until SIGRTMAX comes, and prints the number. With "send", a pid and a
 * number it sends at most that many SIGRTMIN to that process, until the kernel refuses one, and prints how many were
 * accepted. With "end" and a pid it sends SIGRTMAX as soon as the kernel accepts that. */
#include "program.h"
#include <signal.h>

enum { AT_ONCE = 3000 };

static volatile sig_atomic_t count, over;

static void on(int signal)
{
	if (signal == SIGRTMIN)
		count++;
	else
		over = 1;
}

static int send(pid_t pid, int signal)
{
	union sigval value = { 0 };
	return sigqueue(pid, signal, value);
}

static int send_many(pid_t pid, int most)
{
	int sent = 0;
	while (sent < most && send(pid, SIGRTMIN) == 0)
		sent++;
	return sent;
}

static void await_over(void)
{
	double begun = now();
	while (!over) {
		rest_ms(1);
		if (now() > begun + 100)
			fail("FAIL: %d signals have come, and not the last one\n", (int)count);
	}
}

int main(int argc, char **argv)
{
	const char *task = argc > 1 ? argv[1] : "";
	pid_t pid = argc > 2 ? atoi(argv[2]) : 0;
	if (strcmp(task, "send") == 0) {
		printf("%d\n", send_many(pid, atoi(argv[3])));
		return 0;
	}
	if (strcmp(task, "end") == 0) {
		while (send(pid, SIGRTMAX) != 0)
			rest_ms(10);
		return 0;
	}
	struct sigaction action = { .sa_handler = on, .sa_flags = SA_RESTART };
	sigfillset(&action.sa_mask);
	CHECK_IS(sigaction(SIGRTMIN, &action, NULL) | sigaction(SIGRTMAX, &action, NULL), 0);
	if (strcmp(task, "count") == 0) {
		puts("ready"), fflush(stdout);
		await_over();
		printf("%d\n", (int)count), fflush(stdout);
		return pass();
	}
	do {
		count = over = 0;
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			CHECK_IS(send_many(getppid(), AT_ONCE), AT_ONCE);
			CHECK_IS(send(getppid(), SIGRTMAX), 0);
			_exit(0);
		}
		await_over();
		CHECK_IS(count, AT_ONCE);
		await_exit(child, 0);
	} while (going());
	return pass();
}
