/* Proves: the calls of a child take no longer because of what its parent does. With the argument
 * "transfers" the parent reads a file again and again: the named file, or its standard input. With
 * "opens" and names of files the parent opens the files, prints a line, waits for a line, reads
 * once from each file, and prints another line. With "maps" the parent maps the files instead of
 * reading them. With "syncs" and the name of a file a second thread of the parent writes to the
 * file and synchronises it, and prints a line before and after the fsync. If there is a line on
 * standard input meanwhile, the first thread makes a call that only home can make, and prints a
 * line after that. With "kills" the parent sends signals to a second child, the target, until the
 * parent can read a line. With "executes" and the name of a file a second child opens the file, and
 * executes a program, which closes the file. The first child prints the duration of its slowest call to standard error
 * if that took longer than TERN_SLOWEST seconds. */
#include "program.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

static void child(void)
{
	double limit = getenv("TERN_SLOWEST") ? atof(getenv("TERN_SLOWEST")) : 900, slowest = 0;
	double begun = now();
	/* Any of these calls may be the one that waits. */
	while (going()) {
		CHECK_IS(syscall(SYS_getppid), getppid());
		rest_ms(2);
		if (now() - begun > slowest)
			slowest = now() - begun;
		begun = now();
	}
	if (slowest > limit)
		fail("its calls took %.3f s\n", slowest);
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
	/* Whether this read fails is up to the server of the files. */
	for (int i = 0; i < count; i++)
		if (read(files[i], &byte, 1) < 0)
			continue;
	puts("read"), fflush(stdout);
}

static void maps(int count, char **names)
{
	char line[16];
	int files[16];
	for (int i = 0; i < count; i++)
		CHECK((files[i] = open(names[i], O_RDONLY)) >= 0);
	say("opened\n");
	CHECK(read(0, line, sizeof line) > 0);
	for (int i = 0; i < count; i++)
		CHECK(mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, files[i], 0) != MAP_FAILED);
	say("mapped\n");
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

static void ignore(int signal) { (void)signal; }

static void kills(void)
{
	struct sigaction action = { .sa_handler = ignore, .sa_flags = SA_RESTART };
	struct pollfd line = { .fd = 0, .events = POLLIN };
	CHECK_IS(sigaction(SIGUSR1, &action, NULL), 0);
	pid_t target = fork();
	CHECK(target >= 0);
	while (target == 0)
		pause();
	say("target\n");
	while (poll(&line, 1, 5) == 0)
		CHECK_IS(kill(target, SIGUSR1), 0);
	CHECK_IS(kill(target, SIGKILL), 0);
	CHECK_IS(waitpid(target, NULL, 0), target);
}

static pid_t executes(char *name)
{
	pid_t second = fork();
	CHECK(second >= 0);
	if (second == 0) {
		CHECK(open(name, O_RDONLY | O_CLOEXEC) >= 0);
		execl("/bin/true", "true", (char *)NULL);
		_exit(1);
	}
	return second;
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
	if (argc > 1 && strcmp(argv[1], "maps") == 0)
		maps(argc - 2, argv + 2);
	if (argc > 2 && strcmp(argv[1], "syncs") == 0)
		syncs(argv[2]);
	if (argc > 1 && strcmp(argv[1], "kills") == 0)
		kills();
	pid_t second = argc > 2 && strcmp(argv[1], "executes") == 0 ? executes(argv[2]) : 0;
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
	if (second) {
		CHECK_IS(waitpid(second, &status, 0), second);
		CHECK_IS(status, 0);
	}
	return pass();
}
