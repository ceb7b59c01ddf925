/* Proves: /proc shows the program as at home: links, descriptors and their state, arguments,
 * environment, limits, name, start time; its threads; and files under /dev: shm, fd, null, full,
 * zero, urandom, tty. */
#include "program.h"
#include <dirent.h>
#include <elf.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/resource.h>

static char text[16384];

static ssize_t slurp(const char *name)
{
	int fd = open(name, O_RDONLY);
	CHECK(fd >= 0);
	ssize_t length = 0, n;
	while ((n = read(fd, text + length, sizeof text - 1 - (size_t)length)) > 0)
		length += n;
	CHECK_IS(n, 0);
	text[length] = 0;
	close(fd);
	return length;
}

static const char *link_of(const char *name)
{
	ssize_t n = readlink(name, text, sizeof text - 1);
	CHECK(n > 0);
	text[n] = 0;
	return text;
}

static const char *line(const char *name, const char *begin)
{
	slurp(name);
	const char *at = strstr(text, begin);
	CHECK(at != NULL);
	*strchrnul(at, '\n') = 0;
	return at + strlen(begin);
}

/* Since boot, in ticks: field 22 of stat. */
static long long started(void)
{
	slurp("/proc/self/stat");
	const char *at = strrchr(text, ')');
	CHECK(at != NULL);
	for (int field = 2; field < 22; field++)
		CHECK((at = strchr(at + 1, ' ')) != NULL);
	return atoll(at);
}

int main(int argc, char **argv)
{
	char name[64];
	(void)argc;
	enter_scratch();
	CHECK_IS(prctl(PR_SET_NAME, "renamed"), 0);
	struct rlimit limit = { 123, 456 };
	CHECK_IS(setrlimit(RLIMIT_CORE, &limit), 0);
	long long begun = started();
	double now_in_ticks = now() * (double)sysconf(_SC_CLK_TCK);
	CHECK((double)begun > now_in_ticks - 1000 && (double)begun <= now_in_ticks + 200);
	int file = open("file", O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	CHECK(file >= 0 && write(file, "0123456789", 10) == 10);
	do {
		CHECK(strstr(link_of("/proc/self/exe"), "/procfiles") != NULL);
		CHECK_IS(strcmp(link_of("/proc/self/cwd"), scratch), 0);
		CHECK_IS(strcmp(link_of("/proc/self/root"), "/"), 0);
		CHECK_IS(atoi(link_of("/proc/self")), getpid());
		snprintf(name, sizeof name, "%d/task/%d", getpid(), getpid());
		CHECK_IS(strcmp(link_of("/proc/thread-self"), name), 0);
		/* descriptors, their offset and flags */
		CHECK_IS(lseek(file, 4, SEEK_SET), 4);
		snprintf(name, sizeof name, "/proc/self/fdinfo/%d", file);
		CHECK_IS(atoi(line(name, "pos:\t")), 4);
		CHECK_IS(strtol(line(name, "flags:\t"), NULL, 8), O_RDWR | O_APPEND | O_CLOEXEC | O_LARGEFILE | 0100000);
		snprintf(name, sizeof name, "/dev/fd/%d", file);
		int again = open(name, O_RDONLY);
		CHECK(again >= 0 && read(again, text, 3) == 3 && memcmp(text, "012", 3) == 0);
		CHECK_IS(lseek(file, 0, SEEK_CUR), 4);
		close(again);
		/* itself */
		CHECK_IS(strcmp((slurp("/proc/self/comm"), text), "renamed\n"), 0);
		CHECK_IS(strcmp(line("/proc/self/status", "Name:\t"), "renamed"), 0);
		CHECK_IS(atoi(line("/proc/self/status", "Pid:\t")), getpid());
		CHECK_IS(atoi(line("/proc/self/status", "PPid:\t")), getppid());
		CHECK_IS(atoi(line("/proc/self/status", "Uid:\t")), getuid());
		CHECK_IS(atoi(line("/proc/self/status", "Threads:\t")), 1);
		CHECK_IS(atoi(line("/proc/self/status", "Seccomp:\t")), 0);
		CHECK_IS(started(), begun);
		slurp("/proc/self/cmdline");
		CHECK_IS(strcmp(text, argv[0]), 0);
		slurp("/proc/self/environ");
		CHECK(strchr(text, '=') != NULL);
		CHECK(strstr(line("/proc/self/limits", "Max core file size"), "123                  456") != NULL);
		ssize_t length = slurp("/proc/self/auxv");
		bool random = false;
		for (Elf64_auxv_t *a = (Elf64_auxv_t *)text; (char *)a < text + length && a->a_type; a++)
			random |= a->a_type == AT_RANDOM && a->a_un.a_val == getauxval(AT_RANDOM);
		CHECK(random);
		slurp("/proc/self/oom_score_adj");
		int adjust = atoi(text), fd = open("/proc/self/oom_score_adj", O_WRONLY);
		CHECK(fd >= 0);
		length = snprintf(name, sizeof name, "%d", adjust + 1 > 1000 ? 1000 : adjust + 1);
		CHECK_IS(write(fd, name, (size_t)length), length);
		close(fd);
		slurp("/proc/self/oom_score_adj");
		CHECK_IS(atoi(text), adjust + 1 > 1000 ? 1000 : adjust + 1);
		fd = open("/proc/self/comm", O_WRONLY);
		CHECK(fd >= 0 && write(fd, "otherwise", 9) == 9 && close(fd) == 0);
		CHECK(prctl(PR_GET_NAME, name) == 0 && strcmp(name, "otherwise") == 0);
		CHECK_IS(prctl(PR_SET_NAME, "renamed"), 0);
		int count = 0;
		DIR *tasks = opendir("/proc/self/task");
		CHECK(tasks != NULL);
		for (struct dirent *one; (one = readdir(tasks));)
			if (one->d_name[0] != '.')
				count += atoi(one->d_name) == getpid();
		closedir(tasks);
		CHECK_IS(count, 1);
		CHECK(strstr((slurp("/proc/self/mountinfo"), text), " / ") != NULL);
		CHECK(slurp("/proc/self/cgroup") > 0 && slurp("/proc/meminfo") > 0 && slurp("/proc/uptime") > 0);
		CHECK(slurp("/proc/loadavg") > 0 && slurp("/proc/sys/kernel/pid_max") > 0);
		/* /dev */
		snprintf(name, sizeof name, "/dev/shm/tern-%d", getpid());
		fd = open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
		if (fd >= 0) {
			CHECK(write(fd, "shared", 6) == 6 && pread(fd, text, 6, 0) == 6 && memcmp(text, "shared", 6) == 0);
			CHECK(close(fd) == 0 && unlink(name) == 0);
		}
		fd = open("/dev/full", O_RDWR);
		CHECK(fd >= 0 && read(fd, text, 100) == 100 && text[99] == 0);
		CHECK(write(fd, "x", 1) == -1 && errno == ENOSPC && close(fd) == 0);
		fd = open("/dev/zero", O_RDONLY);
		CHECK(fd >= 0 && read(fd, text, 100) == 100 && text[50] == 0 && close(fd) == 0);
		fd = open("/dev/urandom", O_RDONLY);
		CHECK(fd >= 0 && read(fd, text, 100) == 100 && close(fd) == 0);
		fd = open("/dev/null", O_RDWR);
		CHECK(fd >= 0 && write(fd, text, 100) == 100 && read(fd, text, 100) == 0 && close(fd) == 0);
		fd = open("/dev/tty", O_RDWR);
		CHECK(fd >= 0 ? close(fd) == 0 : errno == ENXIO);
	} while (going());
	close(file);
	CHECK_IS(unlink("file"), 0);
	leave_scratch();
	return pass();
}
