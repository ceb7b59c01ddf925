/* The state of an actor (a process that makes calls), its log, and how it chooses arguments. */
#ifndef RANDOMCALLS_CORE_H
#define RANDOMCALLS_CORE_H

#include "../program.h"
#include <poll.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define PAGE 4096
/* Descriptors that the calls use are below MAX_FD; those of the generator itself begin at OWN_FD. */
enum { MAX_FD = 40, CLOSE_ABOVE = 24, OWN_FD = 500 };
/* A long that prints as a result: the value, or the error. */
#define CALL(name, ...) syscall(SYS_##name, ##__VA_ARGS__)

enum kind { CLOSED, FILES, DIRECTORY, PATH, PIPE_IN, PIPE_OUT, SOCKET, EVENT, TIMER, SIGNALS, EPOLL, NOTIFY, MEMORY, PROCESS, OTHER };

/* Groups of calls. A seed uses about half of them, so that a few kinds of calls meet often. */
enum family { F_FILES, F_NAMES, F_COPY, F_PIPES, F_EVENTS, F_MEMORY, F_SIGNALS, F_PROCESSES, F_LIMITS, F_THREADS, F_IPC, F_SHARE, F_HOMEWARD, FAMILIES };

static struct {
	char name[64]; /* `0` is the first process, `0.2` its second child */
	uint64_t random;
	unsigned children, step, depth;
	bool families[FAMILIES];
	unsigned char kinds[MAX_FD];
	pid_t pids[16]; /* the process itself, then its children */
	int thread;     /* 0 is the main thread */
	int log;
	size_t used;
	char text[1 << 16];
} me;

/* Two areas of memory with a page behind them that cannot be used. */
static char *buffers;
enum { BUFFER_PAGES = 40 };
static const size_t buffers_size = BUFFER_PAGES * PAGE;

UNUSED static uint64_t draw(uint64_t limit)
{
	return next_random(&me.random) / 7 % limit;
}

#define PICK(...) ((const long[]){ __VA_ARGS__ })[draw(sizeof((const long[]){ __VA_ARGS__ }) / sizeof(long))]

UNUSED static bool one_in(unsigned n)
{
	return draw(n) == 0;
}

/* Several constants of a list, or-ed. */
UNUSED static long some_of(const long *flags, size_t count, unsigned rarity)
{
	long all = 0;
	for (size_t i = 0; i < count; i++)
		all |= one_in(rarity) ? flags[i] : 0;
	return all;
}
#define SOME(rarity, ...) some_of((const long[]){ __VA_ARGS__ }, sizeof((const long[]){ __VA_ARGS__ }) / sizeof(long), rarity)

UNUSED static void flush_log(void)
{
	for (size_t done = 0; done < me.used;) {
		ssize_t n = CALL(write, me.log, me.text + done, me.used - done);
		if (n < 0 && errno != EINTR)
			_exit(98);
		done += n > 0 ? (size_t)n : 0;
	}
	me.used = 0;
}

/* One line of the log. Lines are sorted by actor at the end, so that actors may run at the same time. */
__attribute__((format(printf, 1, 2))) UNUSED static void note(const char *format, ...)
{
	int kept = errno;
	va_list rest;
	char *at = me.text + me.used;
	size_t room = sizeof me.text - me.used;
	int n = snprintf(at, room, me.thread ? "%s %u t%d " : "%s %u ", me.name, me.step, me.thread);
	va_start(rest, format);
	n += vsnprintf(at + n, room - (size_t)n, format, rest);
	va_end(rest);
	at[n++] = '\n';
	me.used += (size_t)n;
	errno = kept;
}

/* A result as text; the error's number if it is -1. */
UNUSED static const char *shown(long result)
{
	static char texts[4][32];
	static unsigned next;
	char *text = texts[next++ % 4];
	if (result == -1)
		snprintf(text, 32, "-E%d", errno);
	else
		snprintf(text, 32, "%ld", result);
	return text;
}

/* The result of a call whose memory is bad. Which error comes first is not compared: away, memory is read before the
 * call is made, and written after it (syscalls.md). */
UNUSED static const char *shown_if(bool good, long result)
{
	return good || result > 0 ? shown(result) : "nothing";
}

UNUSED static uint32_t digest(const void *at, size_t length)
{
	uint32_t hash = 2166136261u;
	for (size_t i = 0; i < length; i++)
		hash = (hash ^ ((const unsigned char *)at)[i]) * 16777619u;
	return hash;
}

/* Pids as names: `me`, `child3`, `parent`, `none`. */
UNUSED static const char *who(pid_t pid)
{
	static char text[24];
	if (pid == 0)
		return "none";
	if (pid == me.pids[0])
		return "me";
	for (unsigned i = 1; i < 16; i++)
		if (pid == me.pids[i]) {
			snprintf(text, sizeof text, "child%u", i);
			return text;
		}
	return pid == getppid() ? "parent" : "other";
}

/* A place for a call's data. */
struct place {
	char *at;
	const char *what;
	bool good;
};

/* Memory for `length` bytes: mostly good; else one of the usual wrong pointers. `across`: the memory may end too early. */
UNUSED static struct place some_place(size_t length, bool across)
{
	char *end = buffers + buffers_size;
	switch (draw(24)) {
	case 0:
		return (struct place){ NULL, "null", length == 0 };
	case 1:
		return (struct place){ end, "none", length == 0 };
	case 2:
		/* Without length the kernel checks this address and nothing else would. */
		if (length == 0)
			return (struct place){ NULL, "null", true };
		return (struct place){ (char *)0xffff800000000000, "kernel", false };
	case 3:
	case 4:
		return (struct place){ end - length, "edge", true };
	case 5:
		if (across && length > 1) {
			size_t inside = 1 + draw(length - 1);
			return (struct place){ end - inside, "across", false };
		}
		/* fall through */
	default:
		return (struct place){ buffers + draw(PAGE), "buffer", true };
	}
}

/* What a place contains that was filled before a call, as far as it can be read. */
UNUSED static void fill(struct place place, size_t length)
{
	char *end = buffers + buffers_size;
	if (place.at >= buffers && place.at < end)
		memset(place.at, 0xa5, length < (size_t)(end - place.at) ? length : (size_t)(end - place.at));
}

UNUSED static uint32_t content(struct place place, size_t length)
{
	char *end = buffers + buffers_size;
	if (place.at < buffers || place.at >= end)
		return 0;
	return digest(place.at, length < (size_t)(end - place.at) ? length : (size_t)(end - place.at));
}

/* Data that depends on the seed and the step. */
UNUSED static void random_data(char *at, size_t length)
{
	uint64_t value = draw(UINT32_MAX);
	for (size_t i = 0; i < length; i++)
		at[i] = (char)(value = value * 1103515245 + 12345, value >> 8);
}

UNUSED static size_t some_length(void)
{
	switch (draw(8)) {
	case 0:
		return 0;
	case 1:
		return 1;
	case 2:
		return PAGE * (1 + draw(4));
	case 3:
		return PAGE - 1 + draw(3);
	case 4:
		return 1000 + draw(30000);
	default:
		return 1 + draw(300);
	}
}

/* Records a new descriptor, and closes one if there are many. */
UNUSED static void opened(long fd, enum kind kind)
{
	if (fd < 0)
		return;
	if (fd >= MAX_FD || fd < 3) {
		if (fd >= 3)
			close((int)fd);
		return;
	}
	me.kinds[fd] = (unsigned char)kind;
	unsigned open_ones = 0;
	for (int i = 3; i < MAX_FD; i++)
		open_ones += me.kinds[i] != CLOSED;
	for (; open_ones > CLOSE_ABOVE; open_ones--)
		for (int i = 3 + (int)draw(MAX_FD - 3);; i = i + 1 < MAX_FD ? i + 1 : 3)
			if (me.kinds[i] != CLOSED) {
				note("too many: close(%d) = %s", i, shown(close(i)));
				me.kinds[i] = CLOSED;
				break;
			}
}

/* A descriptor of one of these kinds, sometimes another or none. -1 if the program has no such one. */
UNUSED static int some_fd(unsigned long kinds)
{
	unsigned long chance = draw(30);
	if (chance == 0)
		return (int)PICK(-1, -100, 999999, MAX_FD - 1, INT_MIN);
	if (chance <= 2)
		kinds = ~(1ul << CLOSED | 1ul << SIGNALS | 1ul << NOTIFY | 1ul << TIMER);
	int start = (int)draw(MAX_FD - 3);
	for (int i = 0; i < MAX_FD - 3; i++) {
		int fd = 3 + (start + i) % (MAX_FD - 3);
		if (me.kinds[fd] != CLOSED && (kinds >> me.kinds[fd] & 1))
			return fd;
	}
	return -1;
}
#define OF(kind) (1ul << (kind))
#define STREAMS (OF(FILES) | OF(MEMORY) | OF(PIPE_IN) | OF(PIPE_OUT) | OF(SOCKET) | OF(EVENT))

static void steps(unsigned count);

#endif
