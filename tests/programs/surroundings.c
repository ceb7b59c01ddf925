/* Proves: arguments, environment, command line in /proc, working directory, umask and host name are
 * those of home, and do not change. Run with arguments; prints them. */
#include "program.h"
#include <sys/utsname.h>

extern char **environ;

int main(int argc, char **argv)
{
	struct utsname first, again;
	char command[4096], place[256], cwd[256];
	int wanted = 0;
	for (int i = 1; i < argc; i++)
		say("argument %d: %s\n", i, argv[i]);
	for (int i = 0; i < argc; i++)
		wanted += (int)strlen(argv[i]) + 1;
	CHECK_IS(setenv("TERN_MARK", "one", 1), 0);
	CHECK_IS(uname(&first), 0);
	CHECK_IS(gethostname(place, sizeof place), 0);
	CHECK(strcmp(place, first.nodename) == 0);
	umask(027);
	enter_scratch();
	CHECK(getcwd(place, sizeof place) != NULL);
	do {
		CHECK_IS(uname(&again), 0);
		CHECK(memcmp(&first, &again, sizeof first) == 0);
		CHECK(getcwd(cwd, sizeof cwd) != NULL && strcmp(cwd, place) == 0);
		CHECK(strcmp(getenv("TERN_MARK"), "one") == 0);
		int fd = open("/proc/self/cmdline", O_RDONLY);
		CHECK(fd >= 0);
		CHECK_IS(read(fd, command, sizeof command), wanted);
		close(fd);
		const char *p = command;
		for (int i = 0; i < argc; i++, p += strlen(p) + 1)
			if (strcmp(p, argv[i]) != 0)
				fail("FAIL: argument %d is \"%s\", and /proc says \"%s\"\n", i, argv[i], p);
		fd = open("/proc/sys/kernel/hostname", O_RDONLY);
		CHECK(fd >= 0);
		ssize_t n = read(fd, command, sizeof command);
		CHECK_IS(n, strlen(first.nodename) + 1);
		CHECK(memcmp(command, first.nodename, strlen(first.nodename)) == 0);
		close(fd);
		/* the mask applies to created files; a directory entered and left */
		struct stat about;
		fd = open("made", O_WRONLY | O_CREAT, 0666);
		CHECK(fd >= 0 && fstat(fd, &about) == 0);
		CHECK_IS(about.st_mode & 0777, 0640);
		close(fd);
		CHECK_IS(umask(027), 027);
		CHECK_IS(unlink("made"), 0);
		CHECK(mkdir("inner", 0777) == 0 && chdir("inner") == 0);
		CHECK(getcwd(cwd, sizeof cwd) != NULL && strcmp(cwd + strlen(place), "/inner") == 0);
		CHECK(chdir("..") == 0 && rmdir("inner") == 0);
		for (char **e = environ; *e; e++)
			CHECK(strchr(*e, '=') != NULL);
	} while (going());
	leave_scratch();
	return pass();
}
