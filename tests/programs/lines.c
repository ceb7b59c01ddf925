/* Proves: lines read from standard input, blocked between them: from a terminal, whose settings
 * and size it reads, or from a pipe. Ends at "end". */
#include "program.h"
#include <sys/ioctl.h>
#include <termios.h>

int main(void)
{
	struct termios settings;
	struct winsize size;
	if (isatty(0)) {
		CHECK_IS(tcgetattr(0, &settings), 0);
		CHECK_IS(ioctl(0, TIOCGWINSZ, &size), 0);
		say("a terminal of %d by %d, %s, foreground %d\n", size.ws_col, size.ws_row,
		    settings.c_lflag & ICANON ? "by line" : "raw", tcgetpgrp(0) == getpgrp());
	} else {
		say("no terminal\n");
	}
	char line[256];
	size_t length = 0;
	int count = 0;
	for (;;) {
		ssize_t n = read(0, line + length, 1);
		CHECK(n >= 0);
		if (n == 0)
			break;
		if (line[length++] != '\n') {
			CHECK(length < sizeof line);
			continue;
		}
		line[length - 1] = 0;
		length = 0;
		/* Before the answer, since what is typed after the answer must be echoed. */
		if (strcmp(line, "raw") == 0) {
			struct termios raw = settings;
			raw.c_lflag &= (tcflag_t) ~(ICANON | ECHO);
			CHECK_IS(tcsetattr(0, TCSANOW, &raw), 0);
			CHECK_IS(tcgetattr(0, &raw), 0);
			CHECK((raw.c_lflag & ICANON) == 0);
			CHECK_IS(tcsetattr(0, TCSANOW, &settings), 0);
		}
		say("line %d: %s\n", ++count, line);
		if (strcmp(line, "end") == 0)
			return pass();
	}
	fail("FAIL: the input ended without an end\n");
}
