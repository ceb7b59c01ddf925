/* Proves: pseudo-terminals made by the program: a session on one, sizes, characters that cause
 * signals, foreground and background groups (SIGTTIN, SIGTTOU), packet mode, orphaned groups,
 * and hang-up. */
#include "program.h"
#include <poll.h>
#include <setjmp.h>
#include <sys/ioctl.h>
#include <termios.h>

static volatile sig_atomic_t seen[65];
static void on(int signal) { seen[signal]++; }
static sigjmp_buf away;
static void leave(int signal) { siglongjmp(away, signal); }

static void handle(int signal, void (*handler)(int))
{
	struct sigaction action = { .sa_handler = handler };
	CHECK_IS(sigaction(signal, &action, NULL), 0);
}

static int master;
static char slave[32];

static void make(void)
{
	master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
	CHECK(master >= 0);
	CHECK_IS(grantpt(master) | unlockpt(master), 0);
	CHECK_IS(ptsname_r(master, slave, sizeof slave), 0);
	struct termios t;
	CHECK_IS(tcgetattr(master, &t), 0);
	t.c_lflag &= ~(tcflag_t)(ECHO | ECHOCTL | ECHOK | ECHOE);
	t.c_oflag &= ~(tcflag_t)OPOST;
	CHECK_IS(tcsetattr(master, TCSANOW, &t), 0);
}

/* A child that leads a session on the terminal; its output goes to the master. */
static pid_t lead(void)
{
	pid_t child = fork();
	CHECK(child >= 0);
	if (child)
		return child;
	CHECK_IS(setsid(), getpid());
	int fd = open(slave, O_RDWR);
	CHECK(fd >= 0);
	CHECK_IS(ioctl(fd, TIOCSCTTY, 0), 0);
	for (int i = 0; i < 2; i++)
		CHECK_IS(dup2(fd, i), i);
	close(fd), close(master);
	return 0;
}

static void type(const char *text) { CHECK_IS(write(master, text, strlen(text)), (ssize_t)strlen(text)); }

/* Reads from the master until exactly this text has come. */
static void expect(const char *text)
{
	char got[128] = "";
	size_t have = 0, wanted = strlen(text);
	while (have < wanted) {
		ssize_t n = read(master, got + have, wanted - have);
		CHECK(n > 0);
		have += (size_t)n;
		if (memcmp(got, text, have) != 0)
			fail("FAIL: the terminal says \"%s\", not \"%s\"\n", got, text);
	}
}

static void session(void)
{
	make();
	pid_t child = lead();
	if (child == 0) {
		CHECK_IS(tcgetsid(0), getpid());
		CHECK_IS(tcgetpgrp(0), getpid());
		CHECK(isatty(0) && open("/dev/tty", O_RDWR) >= 0);
		handle(SIGWINCH, on), handle(SIGINT, leave), handle(SIGQUIT, on);
		say("ready\n");
		char line[64];
		while (!seen[SIGWINCH])
			rest_ms(2);
		struct winsize size;
		CHECK_IS(ioctl(0, TIOCGWINSZ, &size), 0);
		say("%dx%d\n", size.ws_col, size.ws_row);
		ssize_t n;
		while ((n = read(0, line, sizeof line)) < 0)
			CHECK_IS(errno, EINTR);
		CHECK(n == 5 && memcmp(line, "edit\n", 5) == 0);
		/* a signal character flushes the input typed before, and interrupts the read: by
		 * a jump, since a signal just before the read would interrupt nothing */
		if (sigsetjmp(away, 1) == 0) {
			say("line\n");
			n = read(0, line, sizeof line);
			fail("FAIL: a read that was to be interrupted ended with %zd\n", n);
		}
		say("int\n");
		while (!seen[SIGQUIT])
			rest_ms(2);
		say("quit\n");
		CHECK_IS(read(0, line, sizeof line), 0); /* ^D */
		/* raw mode */
		struct termios t;
		CHECK_IS(tcgetattr(0, &t), 0);
		t.c_lflag &= ~(tcflag_t)(ICANON | ISIG), t.c_cc[VMIN] = 3, t.c_cc[VTIME] = 0;
		CHECK_IS(tcsetattr(0, TCSADRAIN, &t), 0);
		say("raw\n");
		CHECK_IS(read(0, line, sizeof line), 3);
		CHECK(memcmp(line, "\003\004x", 3) == 0);
		t.c_cc[VMIN] = 0, t.c_cc[VTIME] = 1;
		CHECK_IS(tcsetattr(0, TCSANOW, &t), 0);
		CHECK_IS(read(0, line, sizeof line), 0); /* a tenth of a second */
		_exit(31);
	}
	expect("ready\n");
	struct winsize size = { 33, 99, 0, 0 };
	CHECK_IS(ioctl(master, TIOCSWINSZ, &size), 0);
	expect("99x33\n");
	type("exit\177\177\177dot\177\177it\n"); /* erased and typed again */
	expect("line\n");
	type("lost\003");
	expect("int\n");
	type("\034");
	expect("quit\n");
	type("\004");
	expect("raw\n");
	type("\003\004x");
	await_exit(child, 31);
	char byte;
	CHECK_IS(read(master, &byte, 1), -1);
	CHECK_IS(errno, EIO); /* the other side is closed */
	close(master);
}

/* A minimal shell: background jobs are stopped when they use the terminal, and continue in the
 * foreground. */
static void jobs(void)
{
	make();
	pid_t child = lead();
	if (child == 0) {
		int status;
		CHECK_IS(tcgetattr(0, &(struct termios){ 0 }), 0);
		handle(SIGTTOU, SIG_IGN);
		pid_t reader = fork();
		CHECK(reader >= 0);
		if (reader == 0) {
			CHECK_IS(setpgid(0, 0), 0);
			handle(SIGTTOU, SIG_DFL);
			char line[16];
			ssize_t n = read(0, line, sizeof line); /* SIGTTIN stops it here; then it continues */
			_exit(n == 4 && memcmp(line, "job\n", 4) == 0 ? 5 : 1);
		}
		setpgid(reader, reader);
		CHECK_IS(waitpid(reader, &status, WUNTRACED), reader);
		CHECK(WIFSTOPPED(status));
		CHECK_IS(WSTOPSIG(status), SIGTTIN);
		CHECK_IS(tcsetpgrp(0, reader), 0);
		CHECK_IS(tcgetpgrp(0), reader);
		CHECK_IS(kill(-reader, SIGCONT), 0);
		CHECK_IS(waitpid(reader, &status, WCONTINUED), reader);
		CHECK(WIFCONTINUED(status));
		say("go\n");
		await_exit(reader, 5);
		CHECK_IS(tcsetpgrp(0, getpid()), 0);

		pid_t writer = fork();
		CHECK(writer >= 0);
		if (writer == 0) {
			handle(SIGTTOU, SIG_DFL);
			CHECK_IS(setpgid(0, 0), 0);
			struct termios t;
			CHECK_IS(tcgetattr(0, &t), 0);
			CHECK_IS(tcsetattr(0, TCSANOW, &t), 0); /* SIGTTOU stops it here */
			_exit(6);
		}
		setpgid(writer, writer);
		CHECK_IS(waitpid(writer, &status, WUNTRACED), writer);
		CHECK(WIFSTOPPED(status));
		CHECK_IS(WSTOPSIG(status), SIGTTOU);
		CHECK_IS(tcsetpgrp(0, writer), 0);
		CHECK_IS(kill(writer, SIGCONT), 0);
		await_exit(writer, 6);
		CHECK_IS(tcsetpgrp(0, getpid()), 0);
		/* ^Z stops the foreground group */
		pid_t sleeper = fork();
		CHECK(sleeper >= 0);
		if (sleeper == 0) {
			handle(SIGTTOU, SIG_IGN);
			CHECK_IS(setpgid(0, 0), 0);
			CHECK_IS(tcsetpgrp(0, getpid()), 0);
			say("sleeps\n");
			for (;;)
				pause();
		}
		CHECK_IS(waitpid(sleeper, &status, WUNTRACED), sleeper);
		CHECK(WIFSTOPPED(status));
		CHECK_IS(WSTOPSIG(status), SIGTSTP);
		CHECK_IS(tcsetpgrp(0, getpid()), 0);
		CHECK_IS(kill(-sleeper, SIGTERM) | kill(-sleeper, SIGCONT), 0);
		CHECK_IS(waitpid(sleeper, &status, 0), sleeper);
		CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
		_exit(32);
	}
	expect("go\n");
	type("job\n");
	expect("sleeps\n");
	type("\032");
	await_exit(child, 32);
	close(master);
}

/* Hang-up: the session leader gets SIGHUP, and when it ends the foreground group does; a stopped
 * group that is orphaned gets SIGHUP and SIGCONT. */
static void hang_up(void)
{
	int told[2];
	CHECK_IS(pipe(told), 0);
	make();
	pid_t child = lead();
	if (child == 0) {
		handle(SIGHUP, on);
		pid_t stopped = fork();
		CHECK(stopped >= 0);
		if (stopped == 0) {
			CHECK_IS(setpgid(0, 0), 0);
			handle(SIGCONT, on);
			raise(SIGSTOP);
			while (!seen[SIGHUP] || !seen[SIGCONT])
				rest_ms(2);
			char byte;
			CHECK_IS(read(0, &byte, 1), 0); /* its terminal is gone */
			CHECK_IS(write(1, "x", 1), -1);
			CHECK_IS(errno, EIO);
			CHECK_IS(write(told[1], "o", 1), 1);
			_exit(0);
		}
		int status;
		CHECK_IS(waitpid(stopped, &status, WUNTRACED), stopped);
		CHECK(WIFSTOPPED(status));
		say("up\n");
		char byte;
		ssize_t n = read(0, &byte, 1);
		CHECK(n == 0 || (n < 0 && (errno == EIO || errno == EINTR)));
		while (!seen[SIGHUP])
			rest_ms(2);
		_exit(33);
	}
	close(told[1]);
	expect("up\n");
	close(master);
	await_exit(child, 33);
	char byte;
	CHECK_IS(read(told[0], &byte, 1), 1);
	CHECK_IS(byte, 'o');
	CHECK_IS(read(told[0], &byte, 1), 0);
	close(told[0]);
}

static void packets(void)
{
	make();
	int one = 1, fd = open(slave, O_RDWR | O_NOCTTY);
	CHECK(fd >= 0);
	CHECK_IS(ioctl(master, TIOCPKT, &one), 0);
	char got[16];
	CHECK_IS(write(fd, "data", 4), 4);
	CHECK_IS(read(master, got, 16), 5);
	CHECK(got[0] == TIOCPKT_DATA && memcmp(got + 1, "data", 4) == 0);
	CHECK_IS(tcflush(fd, TCIFLUSH), 0);
	struct pollfd p = { master, POLLIN | POLLPRI, 0 };
	CHECK_IS(poll(&p, 1, -1), 1);
	CHECK(p.revents & POLLPRI);
	CHECK_IS(read(master, got, 16), 1);
	CHECK_IS(got[0], TIOCPKT_FLUSHREAD);
	CHECK_IS(tcflow(fd, TCOOFF), 0);
	CHECK_IS(read(master, got, 16), 1);
	CHECK_IS(got[0], TIOCPKT_STOP);
	CHECK_IS(tcflow(fd, TCOON), 0);
	CHECK_IS(read(master, got, 16), 1);
	CHECK_IS(got[0], TIOCPKT_START);
	int waiting = -1;
	type("wait\n");
	p = (struct pollfd){ fd, POLLIN, 0 };
	CHECK_IS(poll(&p, 1, -1), 1);
	CHECK_IS(ioctl(fd, FIONREAD, &waiting), 0);
	CHECK_IS(waiting, 5);
	CHECK_IS(tcdrain(fd), 0);
	close(fd), close(master);
}

int main(void)
{
	do {
		session();
		jobs();
		hang_up();
		packets();
	} while (going());
	return pass();
}
