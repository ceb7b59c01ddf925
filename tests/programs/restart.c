/* Proves: a signal during the read of a pipe restarts it with SA_RESTART, and ends it with EINTR
 * without; and a handler that runs during a blocked read may itself read and write. */
#include "program.h"

static volatile sig_atomic_t seen;
static int own[2];

static void on(int signal)
{
	char byte = 'h';
	(void)signal;
	int kept = errno;
	CHECK_IS(write(own[1], &byte, 1), 1);
	byte = 0;
	CHECK_IS(read(own[0], &byte, 1), 1);
	CHECK_IS(byte, 'h');
	seen++;
	errno = kept;
}

int main(void)
{
	CHECK_IS(pipe(own), 0);
	do {
		for (int restarts = 0; restarts < 2; restarts++) {
			struct sigaction action = { .sa_handler = on, .sa_flags = restarts ? SA_RESTART : 0 };
			CHECK_IS(sigaction(SIGUSR1, &action, NULL), 0);
			seen = 0;
			int data[2], go[2];
			CHECK(pipe(data) == 0 && pipe(go) == 0);
			pid_t parent = getpid(), child = fork();
			CHECK(child >= 0);
			if (child == 0) {
				/* Three signals; without restart, until each has interrupted the
				 * read: one just before the read interrupts nothing. */
				char byte;
				CHECK_IS(fcntl(go[0], F_SETFL, O_NONBLOCK), 0);
				for (int i = 0; i < 3; i++) {
					do {
						rest_ms(40);
						CHECK_IS(kill(parent, SIGUSR1), 0);
						rest_ms(40);
					} while (!restarts && read(go[0], &byte, 1) != 1);
				}
				rest_ms(40);
				CHECK_IS(write(data[1], "data", 4), 4);
				_exit(0);
			}
			char text[8];
			ssize_t n;
			int interrupted = 0;
			while ((n = read(data[0], text, sizeof text)) < 0) {
				CHECK_IS(errno, EINTR);
				interrupted++;
				CHECK_IS(write(go[1], "g", 1), 1);
			}
			CHECK_IS(n, 4);
			CHECK(memcmp(text, "data", 4) == 0);
			await_exit(child, 0);
			if (restarts) {
				CHECK_IS(interrupted, 0);
				CHECK(seen >= 1 && seen <= 3); /* two of them may have merged */
			} else {
				CHECK(interrupted >= 3 && seen >= interrupted);
			}
			close(data[0]), close(data[1]), close(go[0]), close(go[1]);
		}
	} while (going());
	return pass();
}
