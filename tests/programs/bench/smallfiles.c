/* smallfiles DIRECTORY FILES TRANSACTIONS: the file operations of a mail or news server, as in
 * PostMark. Creates FILES files of 500 to 9,999 bytes in ten directories. A transaction is two
 * operations: a whole file is read, or something is appended to one; and a file is created, or one
 * is removed. At the end removes all. The random choices are the same each time. Prints the sum of
 * all bytes that it has read, which is the same wherever it runs.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LEAST = 500, MOST = 10000, FOLDERS = 10, BLOCK = 4096 };

static char text[MOST];
static unsigned long *numbers; /* of the existing files */
static unsigned long count, made, sum;

static void must(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

static unsigned long chance(unsigned long below)
{
	static uint64_t state = 1997;
	state = state * 6364136223846793005u + 1442695040888963407u;
	return (unsigned long)(state >> 33) % below;
}

static const char *name(unsigned long number)
{
	static char path[64];
	snprintf(path, sizeof path, "s%lu/%lu", number % FOLDERS, number);
	return path;
}

static void put(int file, unsigned long size)
{
	must(file >= 0, "open");
	for (unsigned long at = 0; at < size; at += BLOCK) {
		size_t part = size - at < BLOCK ? size - at : BLOCK;
		must(write(file, text + at, part) == (ssize_t)part, "write");
	}
	must(close(file) == 0, "close");
}

static void make(void)
{
	numbers[count] = made++;
	put(open(name(numbers[count++]), O_WRONLY | O_CREAT | O_EXCL, 0644), LEAST + chance(MOST - LEAST));
}

static void take_away(void)
{
	unsigned long which = chance(count);
	must(unlink(name(numbers[which])) == 0, "unlink");
	numbers[which] = numbers[--count];
}

static void look(void)
{
	unsigned char block[BLOCK];
	int file = open(name(numbers[chance(count)]), O_RDONLY);
	ssize_t got;
	must(file >= 0, "open");
	while ((got = read(file, block, sizeof block)) > 0)
		for (ssize_t i = 0; i < got; i++)
			sum += block[i];
	must(got == 0, "read");
	close(file);
}

static void append(void)
{
	put(open(name(numbers[chance(count)]), O_WRONLY | O_APPEND), 1 + chance(MOST / 4));
}

int main(int argc, char **argv)
{
	char folder[8];
	if (argc != 4)
		return 2;
	unsigned long files = strtoul(argv[2], NULL, 10), transactions = strtoul(argv[3], NULL, 10);
	must(chdir(argv[1]) == 0, argv[1]);
	numbers = calloc(files + transactions + 1, sizeof *numbers);
	must(numbers != NULL, "calloc");
	for (int i = 0; i < MOST; i++)
		text[i] = (char)('a' + i % 23);
	for (int i = 0; i < FOLDERS; i++) {
		snprintf(folder, sizeof folder, "s%d", i);
		must(mkdir(folder, 0755) == 0, folder);
	}
	while (count < files)
		make();
	while (transactions--) {
		chance(2) ? look() : append();
		chance(2) || count == 1 ? make() : take_away();
	}
	while (count)
		take_away();
	for (int i = 0; i < FOLDERS; i++) {
		snprintf(folder, sizeof folder, "s%d", i);
		must(rmdir(folder) == 0, folder);
	}
	printf("%lu\n", sum);
}
