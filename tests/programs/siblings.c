/* Proves: the calls of one process take no longer because of what a relative of it does. With the argument
 * "transfers" the parent meanwhile reads a file again and again: its standard input, or the one that it is given. With
 * "opens" and names of files it opens them, prints a line, waits for a line, reads once from each, and prints another
 * line. With "syncs" and the name of a file a second thread writes to it and synchronises it, and prints a line before
 * and after that. If there is a line on standard input meanwhile, the first thread makes a call that is made at home
 * only, and prints a line after that. The child prints its slowest call to standard error if that took longer than
 * TERN_SLOWEST seconds. */
#include "program.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

static void child(void)
{
	double limit = getenv("TERN_SLOWEST") ? atof(getenv("TERN_SLOWEST")) : 900, slowest = 0;
	while (going()) {
		double begun = now();
		CHECK_IS(syscall(SYS_getppid), getppid());
		if (now() - begun > slowest)
			slowest = now() - begun;
		rest_ms(2);
	}
	if (slowest > limit)
		fail("a call took %.3f s\n", slowest);
	_exit(0);
}

static void opens(int count, char **names)
{
	char line[16], byte;
	int files[16];
	for (int i = 0; i < count; i++)
		CHECK((files[i] = open(names[i], O_RDWR)) >= 0);
	puts("opened"), fflush(stdout);
	CHECK(read(0, line, sizeof line) > 0);
	/* Whether that fails is up to the server of the files. */
	for (int i = 0; i < count; i++)
		if (read(files[i], &byte, 1) < 0)
			continue;
	puts("read"), fflush(stdout);
}

static void *synchronise(void *name)
{
	int file = open(name, O_RDWR);
	CHECK(file >= 0);
	CHECK_IS(write(file, "x", 1), 1);
	say("syncing\n");
	CHECK_IS(fsync(file), 0);
	say("synced\n");
	return NULL;
}

static void syncs(char *name)
{
	pthread_t thread;
	char line[16];
	CHECK_IS(pthread_create(&thread, NULL, synchronise, name), 0);
	if (read(0, line, sizeof line) > 0) {
		CHECK_IS(ioctl(0, 0xdead, 0), -1);
		say("made\n");
	}
	CHECK_IS(pthread_join(thread, NULL), 0);
}

int main(int argc, char **argv)
{
	bool transfers = argc > 1 && strcmp(argv[1], "transfers") == 0;
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (pid == 0)
		child();
	if (argc > 1 && strcmp(argv[1], "opens") == 0)
		opens(argc - 2, argv + 2);
	if (argc > 2 && strcmp(argv[1], "syncs") == 0)
		syncs(argv[2]);
	int file = transfers && argc > 2 ? open(argv[2], O_RDONLY) : 0;
	CHECK(file >= 0);
	while (going()) {
		char block[64];
		if (transfers)
			CHECK_IS(pread(file, block, sizeof block, 0), sizeof block);
		rest_ms(5);
	}
	int status;
	CHECK_IS(waitpid(pid, &status, 0), pid);
	CHECK_IS(status, 0);
	return pass();
}
