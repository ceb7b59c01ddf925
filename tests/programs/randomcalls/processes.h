/* Children: how they are made, what they inherit, how they end, and what the parent learns. */
#ifndef RANDOMCALLS_PROCESSES_H
#define RANDOMCALLS_PROCESSES_H

#include "signals.h"
#include <linux/sched.h>
#include <sched.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/resource.h>

static char own_path[PATH_MAX];
static uint64_t seed;

/* Makes this process a child of the actor that it was. */
static void become_child(unsigned number, uint64_t random)
{
	size_t length = strlen(me.name);
	snprintf(me.name + length, sizeof me.name - length, ".%u", number);
	memset(me.pids, 0, sizeof me.pids);
	me.pids[0] = getpid();
	me.children = 0, me.step = 0, me.thread = 0, me.used = 0;
	me.depth++;
	me.random = random;
	me.families[F_THREADS] = false;
}

/* A fork by one of the calls for it, with an empty log. The child continues as another actor. */
static pid_t make_child(void)
{
	uint64_t random = draw(UINT64_MAX);
	unsigned number = ++me.children, how = (unsigned)draw(4);
	struct clone_args args = { .exit_signal = SIGCHLD };
	flush_log();
	pid_t child;
	if (how == 0)
		child = (pid_t)CALL(clone, SIGCHLD, 0, 0, 0, 0);
	else if (how == 1)
		child = (pid_t)CALL(clone3, &args, sizeof args);
	else if (how == 2)
		child = (pid_t)CALL(fork);
	else
		child = fork();
	if (child == 0)
		become_child(number, random);
	else if (child > 0)
		me.pids[number % 15 + 1] = child;
	return child;
}

__attribute__((noreturn)) static void end_child(int status)
{
	note("ends with %d", status);
	flush_log();
	_exit(status);
}

/* Waits for a child in one of the ways. */
static void await_child(pid_t child)
{
	siginfo_t info = { 0 };
	int status = 0;
	long result;
	if (one_in(4)) {
		result = CALL(waitid, P_PID, child, &info, WEXITED | WNOWAIT, NULL);
		note("waitid nowait = %s %s code %d status %d", shown(result), who(info.si_pid), info.si_code, info.si_status);
	}
	switch (draw(4)) {
	case 0:
		memset(&info, 0, sizeof info);
		result = CALL(waitid, P_PID, child, &info, WEXITED, NULL);
		note("waitid = %s %s code %d status %d", shown(result), who(info.si_pid), info.si_code, info.si_status);
		break;
	case 1:
		memset(&info, 0, sizeof info);
		result = CALL(waitid, P_ALL, 0, &info, WEXITED | WSTOPPED, NULL);
		note("waitid all = %s %s code %d status %d", shown(result), who(info.si_pid), info.si_code, info.si_status);
		break;
	case 2:
		result = CALL(wait4, child, &status, 0, NULL);
		note("wait4 = %s %x", result > 0 ? who((pid_t)result) : shown(result), status);
		break;
	default: {
		int pidfd = (int)CALL(pidfd_open, child, 0);
		struct pollfd wait = { pidfd, POLLIN, 0 };
		while ((result = CALL(poll, &wait, 1, -1)) < 0 && errno == EINTR)
			;
		note("poll pidfd(%d) = %s %x", pidfd, shown(result), wait.revents);
		memset(&info, 0, sizeof info);
		result = CALL(waitid, P_PIDFD, pidfd, &info, WEXITED, NULL);
		note("waitid pidfd = %s %s code %d status %d", shown(result), who(info.si_pid), info.si_code, info.si_status);
		close(pidfd);
	}
	}
	result = CALL(wait4, -1, &status, WNOHANG, NULL);
	note("wait4 none = %s, pending %llx", shown(result), (unsigned long long)pending());
	/* SIGCHLD came before the wait ended, or not at all. */
	uint64_t mask = bit(SIGCHLD);
	struct timespec none = { 0, 0 };
	result = CALL(rt_sigtimedwait, &mask, &info, &none, 8);
	note("  SIGCHLD: %s %s code %d status %d", shown(result), result > 0 ? who(info.si_pid) : "", info.si_code, info.si_status);
}

static void op_fork(void)
{
	if (me.depth >= 2)
		return;
	unsigned count = 1 + (unsigned)draw(12);
	int status = (int)draw(256), end = (int)PICK(0, 0, 0, SIGKILL, SIGTERM, 41);
	pid_t child = make_child();
	if (child == 0) {
		op_survey();
		steps(count);
		if (end) {
			uint64_t mask = bit(end);
			signal(end, SIG_DFL);
			note("kills itself with %d", end);
			flush_log();
			CALL(kill, getpid(), end);
			CALL(rt_sigprocmask, SIG_UNBLOCK, &mask, NULL, 8);
		}
		end_child(status);
	}
	note("fork = %s", child > 0 ? "child" : shown(child));
	if (child > 0)
		await_child(child);
}

/* Parent and child by turns, on the open files and memory that they share. */
static void op_turns(void)
{
	if (me.depth >= 1)
		return;
	int there[2], back[2];
	unsigned turns = 2 + (unsigned)draw(3), count = 1 + (unsigned)draw(5);
	char byte = 0;
	if (pipe(there) || pipe(back))
		return;
	int ends[4] = { there[0], there[1], back[0], back[1] };
	for (int i = 0; i < 4; i++) {
		int low = ends[i];
		ends[i] = fcntl(low, F_DUPFD, OWN_FD + 10 + i * 10);
		close(low);
	}
	pid_t child = make_child();
	if (child == 0) {
		close(ends[1]), close(ends[2]);
		while (read(ends[0], &byte, 1) == 1) {
			steps(count);
			flush_log();
			write(ends[3], &byte, 1);
		}
		end_child(3);
	}
	note("turns %u = %s", turns, child > 0 ? "child" : shown(child));
	close(ends[0]), close(ends[3]);
	for (unsigned i = 0; child > 0 && i < turns; i++) {
		ssize_t n = write(ends[1], &byte, 1);
		while (n == 1 && (n = read(ends[2], &byte, 1)) < 0 && errno == EINTR)
			n = 1;
		if (n != 1) {
			note("the child is gone: %zd", n);
			break;
		}
		me.depth++;
		steps(count);
		me.depth--;
	}
	close(ends[1]), close(ends[2]);
	if (child > 0)
		await_child(child);
}

/* Data through pipes to a child and back, while both may have to wait. Byte counts of single reads are not told. */
static void op_stream(void)
{
	static char data[9000];
	if (me.depth >= 2)
		return;
	int there[2], back[2];
	size_t total = 1 + draw(200000), piece = 1 + draw(sizeof data - 1);
	if (pipe(there) || pipe(back))
		return;
	for (int i = 0; i < 2; i++) {
		int low = there[i];
		there[i] = fcntl(low, F_DUPFD, OWN_FD + 60), close(low);
		low = back[i];
		back[i] = fcntl(low, F_DUPFD, OWN_FD + 80), close(low);
	}
	pid_t child = make_child();
	if (child == 0) {
		close(there[1]), close(back[0]);
		ssize_t n;
		while ((n = read(there[0], data, 1 + draw(sizeof data - 1))) > 0)
			for (ssize_t done = 0, m; done < n; done += m)
				if ((m = write(back[1], data + done, (size_t)(n - done))) <= 0)
					_exit(9);
		end_child(5);
	}
	close(there[0]), close(back[1]);
	fcntl(there[1], F_SETFL, O_NONBLOCK), fcntl(back[0], F_SETFL, O_NONBLOCK);
	uint32_t sent = 2166136261u, got = sent;
	size_t written = 0, received = 0;
	while (child > 0 && received < total) {
		struct pollfd fds[2] = { { back[0], POLLIN, 0 }, { written < total ? there[1] : -1, POLLOUT, 0 } };
		if (CALL(poll, fds, 2, -1) < 0 && errno != EINTR)
			break;
		size_t length = piece < total - written ? piece : total - written;
		for (size_t i = 0; i < length; i++)
			data[i] = (char)((written + i) * 7 + (written + i) / 251);
		ssize_t n = length ? write(there[1], data, length) : 0;
		for (ssize_t i = 0; i < n; i++)
			sent = (sent ^ (unsigned char)data[i]) * 16777619u;
		written += n > 0 ? (size_t)n : 0;
		n = read(back[0], data, sizeof data);
		for (ssize_t i = 0; i < n; i++)
			got = (got ^ (unsigned char)data[i]) * 16777619u;
		received += n > 0 ? (size_t)n : 0;
		if (n == 0)
			break;
	}
	close(there[1]), close(back[0]);
	note("stream %zu by %zu: received %zu, %s", total, piece, received, sent == got ? "equal" : "DIFFERENT");
	if (child > 0)
		await_child(child);
}

/* A child that stops and is continued. */
static void op_stop(void)
{
	siginfo_t info = { 0 };
	int status = 0, sig = (int)PICK(SIGSTOP, SIGTSTP);
	pid_t child = make_child();
	if (child == 0) {
		signal(SIGTSTP, SIG_DFL);
		if (sig == SIGTSTP)
			CALL(setpgid, 0, 0);
		/* In an orphaned group SIGTSTP would be ignored; the parent is in another group of the session. */
		CALL(kill, getpid(), sig);
		note("was continued");
		end_child(6);
	}
	note("stop %d = %s", sig, child > 0 ? "child" : shown(child));
	if (child < 0)
		return;
	if (one_in(2)) {
		long result = CALL(waitid, P_PID, child, &info, WSTOPPED | (one_in(2) ? WNOWAIT : 0), NULL);
		note("waitid stopped = %s %s code %d status %d", shown(result), who(info.si_pid), info.si_code, info.si_status);
	} else {
		long result = CALL(wait4, child, &status, WUNTRACED, NULL);
		note("wait4 stopped = %s %x", result > 0 ? who((pid_t)result) : shown(result), status);
	}
	if (one_in(3)) {
		note("kill = %s", shown(CALL(kill, child, SIGKILL)));
	} else {
		note("continue = %s", shown(CALL(kill, child, SIGCONT)));
		if (one_in(2)) {
			/* The end may come first: then this reports nothing more. */
			memset(&info, 0, sizeof info);
			CALL(waitid, P_PID, child, &info, WEXITED | WNOWAIT, NULL);
		}
	}
	await_child(child);
	/* How many of its signals came as one depends on when the child ran. */
	uint64_t mask = bit(SIGCHLD);
	struct timespec none = { 0, 0 };
	CALL(rt_sigtimedwait, &mask, &info, &none, 8);
}

/* What a new program finds. */
static void inherited(void)
{
	char text[MAX_FD * 4 + 1] = "";
	uint64_t mask = 0;
	CALL(rt_sigprocmask, SIG_BLOCK, NULL, &mask, 8);
	for (int fd = 3; fd < MAX_FD; fd++) {
		long flags = CALL(fcntl, fd, F_GETFD);
		if (flags < 0)
			me.kinds[fd] = CLOSED;
		else
			snprintf(text + strlen(text), sizeof text - strlen(text), " %d", fd);
	}
	long mode = CALL(umask, 0);
	CALL(umask, mode);
	note("executed: mask %llx pending %llx umask %lo descriptors%s", (unsigned long long)mask, (unsigned long long)pending(), mode, text);
	for (int i = 0; i < SIGNAL_COUNT; i++) {
		struct sigaction now;
		sigaction(SIGNALS_USED[i], NULL, &now);
		deadly[SIGNALS_USED[i]] = now.sa_handler == SIG_DFL && SIGNALS_USED[i] != SIGURG && SIGNALS_USED[i] != SIGWINCH;
		if (now.sa_handler == SIG_IGN)
			note("  ignored %d", SIGNALS_USED[i]);
	}
}

/* A new program, made by fork, vfork or posix_spawn, that continues as an actor. */
static void op_exec(void)
{
	extern char **environ;
	if (me.depth >= 2)
		return;
	char kinds[MAX_FD + 1], families[FAMILIES + 1], name[80], random[32], count[16], seed_text[32], depth[8];
	unsigned how = (unsigned)draw(3), number = ++me.children;
	uint64_t start = draw(UINT64_MAX);
	for (int i = 0; i < MAX_FD; i++)
		kinds[i] = (char)('A' + me.kinds[i]);
	for (int i = 0; i < FAMILIES; i++)
		families[i] = me.families[i] ? '1' : '0';
	kinds[MAX_FD] = families[FAMILIES] = 0;
	snprintf(name, sizeof name, "%s.%u", me.name, number);
	snprintf(random, sizeof random, "%llu", (unsigned long long)start);
	snprintf(count, sizeof count, "%d", 1 + (int)draw(8));
	snprintf(seed_text, sizeof seed_text, "%llu", (unsigned long long)seed);
	snprintf(depth, sizeof depth, "%u", me.depth + 1);
	char *words[] = { own_path, "continue", seed_text, name, random, count, kinds, families, scratch, depth, NULL };
	const char *path = one_in(8) ? "missing" : own_path;
	flush_log();
	pid_t child = -1;
	if (how == 2) {
		posix_spawnattr_t attributes;
		posix_spawnattr_init(&attributes);
		posix_spawnattr_setflags(&attributes, (short)SOME(2, POSIX_SPAWN_SETPGROUP));
		int error = posix_spawn(&child, path, NULL, &attributes, words, environ);
		if (error) {
			errno = error;
			child = -1;
		}
	} else {
		/* The child of vfork must not use the log's memory. */
		child = how ? vfork() : fork();
		if (child == 0) {
			execve(path, words, environ);
			_exit(errno == ENOENT ? 111 : 112);
		}
	}
	if (child > 0)
		me.pids[number % 15 + 1] = child;
	note("exec%u %s = %s", how, path == own_path ? "itself" : path, child > 0 ? "child" : shown(child));
	if (child > 0)
		await_child(child);
}

static void op_process(void)
{
	siginfo_t info = { 0 };
	long result;
	switch (draw(5)) {
	case 0:
		note("setpgid = %s, own group %d", shown(CALL(setpgid, 0, 0)), CALL(getpgid, 0) == getpid());
		break;
	case 1:
		result = CALL(waitid, PICK(P_ALL, P_PID, P_PGID, 77), PICK(0, 1, 999999999), &info, PICK(WEXITED, WEXITED | WNOHANG, 0, WSTOPPED, 1 << 20) | WNOHANG, NULL);
		note("waitid = %s", shown(result));
		break;
	case 2:
		note("kill = %s", shown(CALL(kill, 999999999, PICK(0, SIGTERM))));
		break;
	case 3:
		note("parent's child %s", who((pid_t)CALL(getppid)));
		break;
	default:
		note("pidfd_open = %s", shown(CALL(pidfd_open, PICK(999999999, -1, 0), 0)));
	}
}

#endif
