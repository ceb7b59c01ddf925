/* Proves: posix_spawn, vfork and exec, popen, system: children of other programs, their output
 * and their status. */
#include "program.h"
#include <spawn.h>

extern char **environ;

static void read_all(int fd, char *text, size_t size)
{
	size_t length = 0;
	ssize_t n;
	while ((n = read(fd, text + length, size - 1 - length)) > 0)
		length += (size_t)n;
	CHECK_IS(n, 0);
	text[length] = 0;
}

int main(void)
{
	char text[256];
	do {
		int ends[2];
		CHECK_IS(pipe2(ends, O_CLOEXEC), 0);
		posix_spawn_file_actions_t actions;
		CHECK_IS(posix_spawn_file_actions_init(&actions), 0);
		CHECK_IS(posix_spawn_file_actions_adddup2(&actions, ends[1], 1), 0);
		pid_t child;
		char *args[] = { "sh", "-c", "echo spawned $0; exit 5", "here", NULL };
		CHECK_IS(posix_spawn(&child, "/bin/sh", &actions, NULL, args, environ), 0);
		posix_spawn_file_actions_destroy(&actions);
		close(ends[1]);
		read_all(ends[0], text, sizeof text);
		close(ends[0]);
		CHECK(strcmp(text, "spawned here\n") == 0);
		await_exit(child, 5);
		/* a file that cannot be executed */
		char *none[] = { "none", NULL };
		CHECK_IS(posix_spawn(&child, "/no/such/program", NULL, NULL, none, environ), ENOENT);

		child = vfork();
		CHECK(child >= 0);
		if (child == 0) {
			execl("/bin/true", "true", NULL);
			_exit(127);
		}
		await_exit(child, 0);
		volatile int shared = 1;
		child = vfork();
		if (child == 0) {
			shared = 2; /* in the parent's memory */
			_exit(9);
		}
		CHECK_IS(shared, 2);
		await_exit(child, 9);

		FILE *p = popen("echo first; echo second | tr a-z A-Z", "r");
		CHECK(p != NULL);
		CHECK(fgets(text, sizeof text, p) && strcmp(text, "first\n") == 0);
		CHECK(fgets(text, sizeof text, p) && strcmp(text, "SECOND\n") == 0);
		CHECK(!fgets(text, sizeof text, p));
		CHECK_IS(pclose(p), 0);
		int status = system("exit 3");
		CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 3);
		status = system("kill -9 $$");
		CHECK(WIFSIGNALED(status) && WTERMSIG(status) == 9);
	} while (going());
	return pass();
}
