/* Proves: programs of random system calls have the same results wherever they run.
 *
 *   randomcalls [SEED [STEPS]]
 *
 * A seed decides all calls and their arguments. The log has each call, its result and a digest of the memory that it
 * wrote; nothing in it may depend on time, addresses or pids. The same calls are made again and again, so that moves
 * hit them at any moment; each log must equal the first. A shorter run makes the beginning of a longer one's calls.
 *
 * Calls whose results differ by a limit that docs/reference/limits.md or syscalls.md names are left out, with a comment
 * there.
 */
#include "program.h"
#include "randomcalls/threads.h"
#include <ftw.h>

static const struct {
	enum family family;
	unsigned weight;
	void (*call)(void);
} CALLS[] = {
	{ F_FILES, 6, op_open }, { F_FILES, 8, op_read }, { F_FILES, 8, op_write }, { F_FILES, 4, op_seek }, { F_FILES, 3, op_resize },
	{ F_FILES, 5, op_descriptor }, { F_FILES, 3, op_lock }, { F_COPY, 5, op_copy }, { F_NAMES, 3, op_open }, { F_NAMES, 8, op_name },
	{ F_NAMES, 4, op_stat }, { F_NAMES, 2, op_list }, { F_NAMES, 2, op_cwd }, { F_PIPES, 3, op_pipe }, { F_PIPES, 4, op_send },
	{ F_PIPES, 4, op_receive }, { F_PIPES, 2, op_socket }, { F_PIPES, 2, op_poll }, { F_PIPES, 3, op_read }, { F_PIPES, 3, op_write },
	{ F_EVENTS, 4, op_event }, { F_EVENTS, 2, op_timerfd }, { F_EVENTS, 5, op_epoll }, { F_EVENTS, 2, op_poll }, { F_EVENTS, 3, op_notify },
	{ F_MEMORY, 6, op_map }, { F_MEMORY, 6, op_unmap }, { F_MEMORY, 4, op_advise }, { F_MEMORY, 3, op_touch }, { F_MEMORY, 2, op_survey },
	{ F_MEMORY, 1, op_brk }, { F_MEMORY, 3, op_pass }, { F_SIGNALS, 5, op_action }, { F_SIGNALS, 5, op_mask }, { F_SIGNALS, 8, op_raise },
	{ F_SIGNALS, 6, op_wait_signal }, { F_SIGNALS, 1, op_stack }, { F_SIGNALS, 2, op_alarm }, { F_PROCESSES, 2, op_fork },
	{ F_PROCESSES, 2, op_turns }, { F_PROCESSES, 1, op_stream }, { F_PROCESSES, 1, op_stop }, { F_PROCESSES, 2, op_exec },
	{ F_PROCESSES, 1, op_process }, { F_LIMITS, 2, op_limit }, { F_LIMITS, 2, op_prctl }, { F_LIMITS, 1, op_priority },
	{ F_IPC, 3, op_semaphore }, { F_IPC, 3, op_message }, { F_IPC, 1, op_mqueue }, { F_IPC, 3, op_request }, { F_HOMEWARD, 1, op_mapped_write },
};

/* One call of the families in use. */
static void one_call(void)
{
	unsigned total = 0;
	for (size_t i = 0; i < sizeof CALLS / sizeof *CALLS; i++)
		total += me.families[CALLS[i].family] ? CALLS[i].weight : 0;
	uint64_t choice = draw(total);
	for (size_t i = 0; i < sizeof CALLS / sizeof *CALLS; i++) {
		unsigned weight = me.families[CALLS[i].family] ? CALLS[i].weight : 0;
		if (choice < weight) {
			CALLS[i].call();
			return;
		}
		choice -= weight;
	}
}

static void steps(unsigned count)
{
	for (unsigned i = 0; i < count; i++) {
		me.step++;
		if (me.used > sizeof me.text / 2 || getenv("TERN_FLUSH"))
			flush_log();
		if (me.families[F_THREADS] && !me.thread && one_in(2))
			in_thread(1 + (unsigned)draw(THREADS), one_call);
		else
			one_call();
	}
}

/* Memory and handlers, the same for each actor that begins with a new address space. */
static void prepare(void)
{
	const long fixed = MAP_FIXED_NOREPLACE | MAP_PRIVATE | MAP_ANONYMOUS;
	/* Far from all places that the kernel chooses by itself. */
	region = mmap((void *)0x100000000000, (REGION + 1) * PAGE, PROT_NONE, (int)fixed, -1, 0);
	buffers = mmap((void *)0x100010000000, buffers_size + PAGE, PROT_NONE, (int)fixed, -1, 0);
	CHECK(region != MAP_FAILED && buffers != MAP_FAILED);
	CHECK_IS(mprotect(buffers, buffers_size, PROT_READ | PROT_WRITE), 0);
	CHECK_IS(munmap(region, REGION * PAGE), 0);
	struct sigaction faults = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER };
	CHECK_IS(sigaction(SIGSEGV, &faults, NULL), 0);
	CHECK_IS(sigaction(SIGBUS, &faults, NULL), 0);
	signal(SIGXFSZ, SIG_IGN), signal(SIGPIPE, SIG_IGN);
	const char *files[] = { "m0", "m1" };
	int *kept[] = { &map_small, &map_large };
	for (int i = 0; i < 2; i++) {
		int fd = open(files[i], O_RDONLY);
		CHECK(fd >= 0);
		*kept[i] = fcntl(fd, F_DUPFD_CLOEXEC, OWN_FD + 100);
		close(fd);
	}
}

static void make_file(const char *name, size_t size)
{
	static char data[60000];
	int fd = open(name, O_CREAT | O_RDWR, 0444);
	random_data(data, size);
	CHECK_IS(write(fd, data, size), (long)size);
	close(fd);
}

/* The first actor of a seed. */
__attribute__((noreturn)) static void run(unsigned count)
{
	memset(&me, 0, sizeof me);
	strcpy(me.name, "0");
	me.log = OWN_FD;
	me.pids[0] = getpid();
	me.random = seed * 2654435761u + 1;
	for (int i = 0; i < 3; i++)
		next_random(&me.random);
	for (int i = 0; i < FAMILIES; i++)
		me.families[i] = one_in(2);
	me.families[F_FILES] = me.families[F_FILES] || one_in(2);
	me.families[F_HOMEWARD] = one_in(8);
	me.families[F_SHARE] = one_in(4);
	me.families[F_NAMES] = me.families[F_NAMES] || !me.families[F_FILES];
	uint64_t mask = bit(SIGCHLD);
	CALL(rt_sigprocmask, SIG_SETMASK, &mask, NULL, 8);
	umask(022);
	CHECK_IS(chdir(scratch), 0);
	make_file("m0", 2 * PAGE + 100);
	make_file("m1", 60000);
	make_file("a", 20000);
	CHECK(mkdir("d", 0755) == 0 && mkfifo("p", 0600) == 0);
	prepare();
	for (int i = 0; i < SIGNAL_COUNT; i++) {
		struct sigaction action = { .sa_sigaction = on_signal, .sa_flags = SA_SIGINFO };
		sigaction(SIGNALS_USED[i], &action, NULL);
	}
	if (me.families[F_IPC])
		begin_ipc();
	if (me.families[F_THREADS])
		start_threads();
	steps(count);
	if (me.families[F_THREADS])
		end_threads();
	op_survey();
	if (me.families[F_IPC])
		end_ipc();
	end_child(0);
}

/* An actor that began by execve. */
__attribute__((noreturn)) static void run_executed(char **words)
{
	seed = strtoull(words[2], NULL, 10);
	strcpy(me.name, words[3]);
	me.random = strtoull(words[4], NULL, 10);
	me.log = OWN_FD;
	me.pids[0] = getpid();
	me.depth = (unsigned)atoi(words[9]);
	for (int i = 0; i < MAX_FD; i++)
		me.kinds[i] = (unsigned char)(words[6][i] - 'A');
	for (int i = 0; i < FAMILIES; i++)
		me.families[i] = words[7][i] == '1' && i != F_THREADS;
	strcpy(scratch, words[8]);
	prepare();
	inherited();
	steps((unsigned)atoi(words[5]));
	op_survey();
	end_child(7);
}

static int remove_one(const char *path, const struct stat *s, int kind, struct FTW *where)
{
	(void)s, (void)kind, (void)where;
	return remove(path);
}

static char log_text[1 << 22];

static int by_actor(const void *a, const void *b)
{
	const char *one = *(char *const *)a, *two = *(char *const *)b;
	size_t m = strcspn(one, " "), n = strcspn(two, " ");
	int order = strncmp(one, two, m < n ? m : n);
	/* Lines of an actor stay in order. */
	return order ? order : m != n ? (m > n) - (m < n) : (one > two) - (one < two);
}

/* Makes the calls of a seed in a child, and returns the log, sorted by actor. */
static char *log_of(unsigned count)
{
	char name[96];
	const char *where = getenv("TERN_SCRATCH");
	snprintf(scratch, sizeof scratch, "%s/tern-program-XXXXXX", where ? where : "/tmp");
	CHECK(mkdtemp(scratch) != NULL);
	snprintf(name, sizeof name, "%s.log", scratch);
	int low = open(name, O_CREAT | O_RDWR | O_APPEND, 0600);
	CHECK_IS(dup2(low, OWN_FD), OWN_FD);
	close(low);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0)
		run(count);
	int status;
	CHECK_IS(waitpid(child, &status, 0), child);
	ssize_t size = pread(OWN_FD, log_text, sizeof log_text - 1, 0);
	CHECK(size >= 0);
	log_text[size] = 0;
	close(OWN_FD);
	/* With a directory without rights a plain user could not go in. */
	CHECK_IS(nftw(scratch, remove_one, 16, FTW_DEPTH | FTW_PHYS), 0);
	CHECK_IS(unlink(name), 0);
	size_t lines = 0;
	for (char *at = log_text; *at; at++)
		lines += *at == '\n';
	char **sorted = malloc((lines + 1) * sizeof *sorted), *line = log_text, *text = malloc((size_t)size + 64), *to = text;
	for (size_t i = 0; i < lines; i++, line = strchr(line, '\n') + 1)
		sorted[i] = line;
	qsort(sorted, lines, sizeof *sorted, by_actor);
	for (size_t i = 0; i < lines; i++) {
		size_t length = strcspn(sorted[i], "\n") + 1;
		memcpy(to, sorted[i], length);
		to += length;
	}
	sprintf(to, "seed %llu: status %x\n", (unsigned long long)seed, status);
	free(sorted);
	return text;
}

static void compare(const char *first, const char *now, unsigned round)
{
	size_t line = 0, at = 0;
	for (; first[at] == now[at]; at++) {
		if (!first[at])
			return;
		if (first[at] == '\n')
			line = at + 1;
	}
	/* Some lines more: a call that was only late is among them. */
	fail("seed %llu, round %u differs from the first:\n--- first\n%.300s\n--- now\n%.300s\n", (unsigned long long)seed, round, first + line,
	     now + line);
}

int main(int argc, char **argv)
{
	if (argc > 9 && strcmp(argv[1], "continue") == 0)
		run_executed(argv);
	/* Few steps of few seeds, so that each test meets all of them. */
	uint64_t first_seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1, seeds = argc > 1 ? 1 : 6;
	unsigned count = argc > 2 ? (unsigned)atoi(argv[2]) : 60;
	char *logs[6] = { NULL };
	CHECK(realpath(argv[0], own_path) != NULL);
	/* Descriptors are numbered alike everywhere. */
	CALL(close_range, 3, ~0u, 0);
	unsigned round = 0;
	do {
		for (uint64_t i = 0; i < seeds; i++) {
			seed = first_seed + i;
			char *now = log_of(count);
			if (logs[i]) {
				compare(logs[i], now, round);
				free(now);
				continue;
			}
			logs[i] = now;
			for (char *line = now; *line; line += strcspn(line, "\n") + 1)
				say("%.*s\n", (int)strcspn(line, "\n"), line);
		}
		round++;
	} while (going());
	return pass();
}
