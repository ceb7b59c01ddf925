/* Common code of all test programs.
 *
 * A program proves one kernel feature. It repeats its checks until it is asked to end, so that
 * moves hit them at any moment. Its output must not depend on the number of repetitions, nor on
 * pid, address or time.
 *
 *   TERN_SECONDS=S   repeat for S seconds (default 2)
 *   TERN_UNTIL=FILE  afterwards continue until FILE exists, for at most 900 s more: the harness moves the program
 *                    as often as it wants to, then creates the file
 */
#ifndef TERN_PROGRAM_H
#define TERN_PROGRAM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define UNUSED __attribute__((unused))

/* Seconds of the monotonic clock. */
UNUSED static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Writes directly to the descriptor, so that no buffer exists that a fork would duplicate. */
UNUSED static void say_to(int fd, const char *format, va_list rest)
{
	char line[1024];
	int length = vsnprintf(line, sizeof line, format, rest);
	for (int done = 0; done < length;) {
		ssize_t n = write(fd, line + done, (size_t)(length - done));
		if (n < 0 && errno != EINTR)
			_exit(99);
		if (n > 0)
			done += (int)n;
	}
}

__attribute__((format(printf, 1, 2))) UNUSED static void say(const char *format, ...)
{
	va_list rest;
	va_start(rest, format);
	say_to(1, format, rest);
	va_end(rest);
}

__attribute__((format(printf, 1, 2), noreturn)) UNUSED static void fail(const char *format, ...)
{
	va_list rest;
	va_start(rest, format);
	say_to(2, format, rest);
	va_end(rest);
	_exit(1);
}

/* Prints the condition, its location, errno, and the two values that should have been equal. */
#define CHECK(condition)                                                                                     \
	do {                                                                                                 \
		if (!(condition))                                                                            \
			fail("FAIL %s:%d: %s (errno %d: %s)\n", __FILE__, __LINE__, #condition, errno,       \
			     strerror(errno));                                                               \
	} while (0)
#define CHECK_IS(value, wanted)                                                                              \
	do {                                                                                                 \
		long long got_ = (long long)(value), want_ = (long long)(wanted);                            \
		if (got_ != want_)                                                                           \
			fail("FAIL %s:%d: %s is %lld, not %lld (errno %d: %s)\n", __FILE__, __LINE__,        \
			     #value, got_, want_, errno, strerror(errno));                                   \
	} while (0)

/* Whether to repeat once more. */
UNUSED static bool going(void)
{
	static double begun, asked;
	static double seconds = 2;
	static const char *until;
	double t = now();
	if (begun == 0) {
		begun = t;
		if (getenv("TERN_SECONDS"))
			seconds = atof(getenv("TERN_SECONDS"));
		until = getenv("TERN_UNTIL");
	}
	if (t < begun + seconds)
		return true;
	if (!until || t > begun + seconds + 900)
		return false;
	if (t < asked + 0.05)
		return true;
	asked = t;
	int kept = errno;
	bool told = access(until, F_OK) == 0;
	errno = kept;
	return !told;
}

UNUSED static int pass(void)
{
	say("PASS\n");
	return 0;
}

/* A deterministic sequence (Knuth's MMIX constants). */
UNUSED static uint64_t next_random(uint64_t *state)
{
	*state = *state * 6364136223846793005u + 1442695040888963407u;
	return *state >> 16;
}

UNUSED static void rest_ms(long ms)
{
	struct timespec t = { ms / 1000, ms % 1000 * 1000000 };
	while (clock_nanosleep(CLOCK_MONOTONIC, 0, &t, &t) == EINTR)
		;
}

/* Creates an empty directory and enters it; leave_scratch removes it (it must be empty by then). */
static char scratch[64];

UNUSED static void enter_scratch(void)
{
	const char *where = getenv("TERN_SCRATCH");
	snprintf(scratch, sizeof scratch, "%s/tern-program-XXXXXX", where ? where : "/tmp");
	CHECK(mkdtemp(scratch) != NULL);
	CHECK_IS(chdir(scratch), 0);
}

UNUSED static void leave_scratch(void)
{
	CHECK_IS(chdir("/"), 0);
	CHECK_IS(rmdir(scratch), 0);
}

/* Waits for one child, and requires that it exits with this status. */
UNUSED static void await_exit(pid_t child, int status)
{
	int got;
	CHECK_IS(waitpid(child, &got, 0), child);
	CHECK(WIFEXITED(got));
	CHECK_IS(WEXITSTATUS(got), status);
}

/* CPU seconds as home's kernel counts them: it serves /proc wherever the program runs. */
UNUSED static double of_home(void)
{
	char text[1024];
	int fd = open("/proc/self/stat", O_RDONLY);
	CHECK(fd >= 0);
	ssize_t n = read(fd, text, sizeof text - 1);
	CHECK(n > 0);
	close(fd);
	text[n] = 0;
	unsigned long user, system;
	char *rest = strrchr(text, ')');
	CHECK(rest && sscanf(rest + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system) == 2);
	return (double)(user + system) / 100;
}

#endif
