/* Tries: other content in the stub's range, and then calls for which the shim needs the stub. The
 * program itself may fail. */
#include "hostile.h"

static volatile sig_atomic_t caught;

static void catch(int signal)
{
	(void)signal;
	caught++;
}

/* Fills executable memory with this instruction. */
static void fill(uintptr_t at, const char *code, size_t length)
{
	void *there = mmap((void *)at, RANGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
			   -1, 0);
	CHECK(there == (void *)at);
	for (size_t i = 0; i + length <= RANGE; i += length)
		memcpy((char *)at + i, code, length);
}

int main(int argc, char **argv)
{
	CHECK_IS(argc, 3);
	const char *what = argv[2];
	signal(SIGUSR1, catch);
	ready();
	uintptr_t range = find_range(argv[1]);
	if (strcmp(what, "loop") == 0)
		fill(range, "\xeb\xfe", 2); /* jumps to itself */
	else if (strcmp(what, "nothing") == 0)
		fill(range, "\x90", 1);
	else if (strcmp(what, "trap") == 0)
		fill(range, "\xcc", 1); /* a breakpoint, as after a single step */
	else if (strcmp(what, "another call") == 0)
		fill(range, "\xb8\x27\x00\x00\x00\x0f\x05", 7); /* getpid, whatever the shim wanted to call */
	else if (strcmp(what, "repeat") == 0)
		fill(range, "\xf3\xa4\xeb\xfc", 4); /* rep movsb, for ever */
	else if (strcmp(what, "none") == 0)
		CHECK_IS(mprotect((void *)range, RANGE, PROT_NONE), 0);
	else if (strcmp(what, "gone") == 0)
		CHECK_IS(munmap((void *)range, RANGE), 0);
	else
		fail("FAIL: %s is unknown\n", what);
	CHECK(getppid() >= 0);
	raise(SIGUSR1);
	int fd = open("/proc/self/exe", O_RDONLY);
	mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
	pid_t child = fork();
	if (child == 0)
		_exit(0);
	if (child > 0)
		waitpid(child, NULL, 0);
	done();
	return pass();
}
