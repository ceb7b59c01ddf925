/* Proves: a fault away leaves the core that it would have left at home, with the program's memory
 * in it; death by a signal leaves such a core or none, never a wrong one, and the parent gets the
 * right status. */
#include "program.h"
#include <sys/resource.h>

static const char *const name = "core";
/* Made at run time, so that it is only in memory that was written. */
static char *marker;

/* Whether this machine writes cores to files in the current directory. */
static bool cores_lie_here(void)
{
	char pattern[256] = "", with_pid[8] = "";
	int fd = open("/proc/sys/kernel/core_pattern", O_RDONLY);
	read(fd, pattern, sizeof pattern - 1);
	close(fd);
	fd = open("/proc/sys/kernel/core_uses_pid", O_RDONLY);
	read(fd, with_pid, sizeof with_pid - 1);
	close(fd);
	return strcmp(pattern, "core\n") == 0 && with_pid[0] == '0';
}

/* Whether the core is there, complete, with the marker in it; removes it. */
static bool take_core(void)
{
	int fd = open(name, O_RDONLY);
	if (fd < 0)
		return false;
	struct stat s;
	CHECK_IS(fstat(fd, &s), 0);
	char *all = malloc((size_t)s.st_size + 1);
	ssize_t got = 0, n = 0;
	while (got < s.st_size && (n = read(fd, all + got, (size_t)(s.st_size - got))) > 0)
		got += n;
	close(fd);
	CHECK_IS(got, s.st_size);
	CHECK_IS(unlink(name), 0);
	bool whole = memmem(all, (size_t)got, marker, 64) != NULL;
	free(all);
	CHECK(whole);
	return true;
}

static void die(int signal)
{
	struct rlimit most = { 64 << 20, 64 << 20 };
	setrlimit(RLIMIT_CORE, &most);
	if (signal == SIGSEGV)
		*(volatile char *)(getpid() > 0 ? 16UL : 0UL) = 1;
	if (signal == SIGFPE)
		__asm__ volatile("xor %%ecx, %%ecx\n\tmov $1, %%eax\n\tcltd\n\tidiv %%ecx" ::: "eax", "ecx", "edx",
				 "cc");
	if (signal == SIGILL)
		__asm__ volatile("ud2");
	raise(signal);
	_exit(5);
}

int main(void)
{
	/* Faults, then signals. */
	static const int ways[] = { SIGSEGV, SIGFPE, SIGILL, SIGABRT, SIGQUIT };
	bool here = cores_lie_here();
	struct rlimit now;
	CHECK_IS(getrlimit(RLIMIT_CORE, &now), 0);
	bool may = now.rlim_max >= 64 << 20;
	enter_scratch();
	marker = malloc(64);
	uint64_t random = (uint64_t)getpid();
	for (int i = 0; i < 64; i++)
		marker[i] = (char)next_random(&random);
	do {
		for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
			pid_t child = fork();
			CHECK(child >= 0);
			if (child == 0)
				die(ways[i]);
			int status;
			CHECK_IS(waitpid(child, &status, 0), child);
			CHECK(WIFSIGNALED(status));
			CHECK_IS(WTERMSIG(status), ways[i]);
			if (here) {
				bool dumped = take_core();
				CHECK_IS(dumped, WCOREDUMP(status) != 0);
				CHECK(dumped || i >= 3 || !may);
			}
		}
	} while (going());
	leave_scratch();
	return pass();
}
