/* Not hostile: a guest of another family on the same node, which notices each lost or repeated
 * call. */
#include "hostile.h"

int main(void)
{
	int pipes[2];
	CHECK_IS(pipe(pipes), 0);
	ready();
	CHECK_IS(fcntl(0, F_SETFL, O_NONBLOCK), 0);
	say("done\n");
	char line[16];
	uint64_t count = 0, got = 0;
	int parent = getppid();
	while (read(0, line, sizeof line) < 0 && errno == EAGAIN) {
		CHECK_IS(write(pipes[1], &count, sizeof count), sizeof count);
		CHECK_IS(read(pipes[0], &got, sizeof got), sizeof got);
		CHECK_IS(got, count);
		CHECK_IS(getppid(), parent);
		count++;
		rest_ms(2);
	}
	CHECK(count > 0);
	return pass();
}
