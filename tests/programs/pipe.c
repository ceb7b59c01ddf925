/* Proves: pipes in both directions: within a process, and as ping-pong with a child, each message
 * once and in order. */
#include "program.h"

static void answer(int in, int out)
{
	uint32_t number;
	ssize_t n;
	while ((n = read(in, &number, sizeof number)) == sizeof number) {
		number = number * 2 + 1;
		CHECK_IS(write(out, &number, sizeof number), sizeof number);
	}
	CHECK_IS(n, 0);
	_exit(0);
}

int main(void)
{
	int there[2], back[2], own[2];
	CHECK(pipe(there) == 0 && pipe(back) == 0 && pipe2(own, O_CLOEXEC | O_NONBLOCK) == 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		close(there[1]), close(back[0]), close(own[0]), close(own[1]);
		answer(there[0], back[1]);
	}
	close(there[0]), close(back[1]);
	uint32_t number = 0, reply;
	char text[5000], copy[5000];
	do {
		CHECK_IS(write(there[1], &number, sizeof number), sizeof number);
		memset(text, (int)number, sizeof text);
		CHECK_IS(write(own[1], text, sizeof text), sizeof text);
		CHECK_IS(read(own[0], copy, sizeof copy), sizeof copy);
		CHECK(memcmp(text, copy, sizeof copy) == 0);
		CHECK_IS(read(own[0], copy, 1), -1);
		CHECK_IS(errno, EAGAIN);
		CHECK_IS(read(back[0], &reply, sizeof reply), sizeof reply);
		CHECK_IS(reply, number * 2 + 1);
		number++;
	} while (going());
	close(there[1]);
	await_exit(child, 0);
	CHECK_IS(read(back[0], &reply, 4), 0);
	/* no reader: SIGPIPE, or EPIPE where it is ignored */
	close(own[0]);
	signal(SIGPIPE, SIG_IGN);
	CHECK_IS(write(own[1], "x", 1), -1);
	CHECK_IS(errno, EPIPE);
	return pass();
}
