/* filecalls FILE [shared]: how often a second it reads 4 KiB, writes 4 KiB (both sequentially
 * through 1 MiB of a file that it creates, again and again), seeks and reads attributes. With
 * `shared` a child has the file as well, so that no guest can make these calls locally.
 */
#include "stopwatch.h"
#include <fcntl.h>
#include <string.h>
#include <sys/prctl.h>
#include <signal.h>
#include <sys/stat.h>

enum { PAGE = 4096, PAGES = 256 };

static int file;
static unsigned count;
static char page[PAGE];

static void must(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

static void seek(void)
{
	must(lseek(file, (off_t)(count++ % PAGES) * PAGE, SEEK_SET) >= 0, "lseek");
}

/* One in 256 is a seek to the beginning. */
static void round_again(void)
{
	if (count++ % PAGES == 0)
		must(lseek(file, 0, SEEK_SET) == 0, "lseek");
}

static void take(void)
{
	round_again();
	must(read(file, page, PAGE) == PAGE, "read");
}

static void put(void)
{
	round_again();
	must(write(file, page, PAGE) == PAGE, "write");
}

static void ask(void)
{
	struct stat about;
	must(fstat(file, &about) == 0, "fstat");
}

static void measure(const char *name, void (*once)(void))
{
	long rounds = 0;
	count = 0;
	for (int i = 0; i < 200; i++) /* until it is on the fast path */
		once();
	count = 0;
	double begun = now();
	do {
		for (int i = 0; i < 16; i++)
			once();
		rounds += 16;
	} while (now() < begun + 0.5);
	printf("%s %.1f\n", name, (double)rounds / (now() - begun));
}

int main(int argc, char **argv)
{
	if (argc < 2)
		return 2;
	int made = open(argv[1], O_WRONLY | O_CREAT | O_TRUNC, 0644);
	must(made >= 0, argv[1]);
	for (int i = 0; i < PAGES; i++)
		must(write(made, page, PAGE) == PAGE, "write");
	must(close(made) == 0, "close");
	/* One descriptor reads, another one writes, as programs do. */
	file = open(argv[1], O_RDONLY);
	must(file >= 0, argv[1]);
	pid_t child = 0;
	for (int turn = 0; turn < 2; turn++) {
		if (argc == 3) {
			child = fork();
			must(child >= 0, "fork");
			if (child == 0) {
				prctl(PR_SET_PDEATHSIG, SIGKILL);
				for (;;)
					pause();
			}
		}
		if (turn == 0) {
			measure("read", take);
			measure("lseek", seek);
			measure("fstat", ask);
		} else {
			measure("write", put);
		}
		if (child)
			kill(child, SIGKILL);
		close(file);
		file = open(argv[1], O_WRONLY);
		must(file >= 0, argv[1]);
	}
	unlink(argv[1]);
}
