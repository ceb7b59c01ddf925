/*
 * Tests what a file system guarantees when a machine is reset. Three uses:
 *
 *   saver DIR FIRST    writes records to files of DIR for ever, syncs some, and prints on the console which are synced:
 *                      "saved FILE SLOT=VERSION … .". Versions count from FIRST. Failures print "lost" and the operation.
 *                      On SIGUSR1 it tests the files that it keeps for that, and prints the results.
 *   saver read DIR     prints the records that exist: "FILE SLOT VERSION", or "FILE SLOT BAD" for a damaged one.
 *   saver lock FILE    prints whether a record lock of the file is available: "free" or "taken".
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

/* A sector: no disk tears it. */
#define RECORD 512
#define SLOTS 64
#define FILES 6

/* An open file, and what was written to it since the last sync. */
struct file {
	char name[16];
	int fd, flags;
	char *map;
	unsigned long unsaved[SLOTS];
};

static int notes, directory;
static unsigned long version;
static volatile sig_atomic_t is_to_look;

static void note(const char *form, ...)
{
	char line[4096];
	va_list words;
	va_start(words, form);
	int length = vsnprintf(line, sizeof line, form, words);
	va_end(words);
	if (write(notes, line, length) != length || tcdrain(notes))
		_exit(3);
}

static void fill(char *record, const char *name, int slot, unsigned long of)
{
	int at = snprintf(record, RECORD, "%s %d %lu\n", name, slot, of);
	unsigned long state = of * 2654435761u + slot;
	for (; at < RECORD; at++) {
		state = state * 6364136223846793005u + 1442695040888963407u;
		record[at] = state >> 56;
	}
}

static void lost(struct file *file, const char *call, int is_dirty)
{
	note("lost %s %s errno %d unsaved %d .\n", file->name, call, errno, is_dirty);
}

static int dirty(struct file *file)
{
	for (int slot = 0; slot < SLOTS; slot++)
		if (file->unsaved[slot])
			return 1;
	return 0;
}

static void begin(struct file *file)
{
	memset(file->unsaved, 0, sizeof file->unsaved);
	file->fd = openat(directory, file->name, O_CREAT | file->flags, 0644);
	if (file->fd < 0) {
		lost(file, "open", 0);
		_exit(4);
	}
}

static void map(struct file *file)
{
	if (ftruncate(file->fd, SLOTS * RECORD))
		lost(file, "ftruncate", 0);
	file->map = mmap(NULL, SLOTS * RECORD, PROT_READ | PROT_WRITE, MAP_SHARED, file->fd, 0);
	if (file->map == MAP_FAILED) {
		note("no map errno %d .\n", errno);
		file->map = NULL;
	}
}

/* Closes and reopens it: unsynced writes may then be lost without an error. */
static void anew(struct file *file)
{
	int is_mapped = file->map != NULL;
	if (is_mapped)
		munmap(file->map, SLOTS * RECORD);
	close(file->fd);
	begin(file);
	if (is_mapped)
		map(file);
}

static void saved(struct file *file)
{
	char line[SLOTS * 16 + 64];
	int at = sprintf(line, "saved %s", file->name), had = at;
	for (int slot = 0; slot < SLOTS; slot++)
		if (file->unsaved[slot])
			at += sprintf(line + at, " %d=%lu", slot, file->unsaved[slot]);
	memset(file->unsaved, 0, sizeof file->unsaved);
	if (at > had)
		note("%s .\n", line);
}

static void put(struct file *file)
{
	char record[RECORD];
	int slot = random() % SLOTS, was_dirty = dirty(file);
	fill(record, file->name, slot, ++version);
	if (file->map) {
		memcpy(file->map + slot * RECORD, record, RECORD);
	} else if (pwrite(file->fd, record, RECORD, slot * RECORD) != RECORD) {
		lost(file, "write", was_dirty);
		anew(file);
		return;
	}
	file->unsaved[slot] = version;
	if (file->flags & O_SYNC)
		saved(file);
}

static void save(struct file *file)
{
	int failed = file->map ? msync(file->map, SLOTS * RECORD, MS_SYNC)
		   : random() % 2 ? fsync(file->fd) : fdatasync(file->fd);
	if (failed) {
		lost(file, "sync", dirty(file));
		anew(file);
	} else {
		saved(file);
	}
}

/* Creates or replaces a file, and syncs the directory. */
static void make(const char *name, const char *first)
{
	char record[RECORD];
	fill(record, name, 0, ++version);
	/* The directory is opened first, so that errors of the following operations are reported on
	 * this descriptor. */
	int dir = openat(directory, ".", O_RDONLY | O_DIRECTORY);
	int fd = openat(directory, first, O_CREAT | O_TRUNC | O_WRONLY, 0644);
	int good = dir >= 0 && fd >= 0 && write(fd, record, RECORD) == RECORD && !fsync(fd);
	if (good && first != name)
		good = !renameat(directory, first, directory, name);
	if (good && !fsync(dir))
		note("saved %s 0=%lu .\n", name, version);
	else
		note("not made %s errno %d .\n", name, errno);
	close(fd);
	close(dir);
}

static int errno_of(ssize_t done)
{
	return done < 0 ? errno : 0;
}

/* Errors for a writer that has not synced, for a reader of its data, for one that has synced
 * all, and for a lock holder. */
static struct file unsaved = { .name = "unsaved", .flags = O_RDWR }, clean = { .name = "clean", .flags = O_RDWR };
static struct file locked = { .name = "locked", .flags = O_RDWR };
static int reader;

static void keep(void)
{
	struct flock lock = { .l_type = F_WRLCK };
	begin(&unsaved), begin(&clean), begin(&locked);
	put(&unsaved), put(&clean), save(&clean);
	reader = openat(directory, "unsaved", O_RDONLY);
	if (reader < 0 || fcntl(locked.fd, F_SETLK, &lock))
		_exit(5);
	note("kept .\n");
}

static void look(void)
{
	char record[RECORD];
	int read_it = errno_of(pread(reader, record, RECORD, 0)), sync_it = errno_of(fsync(reader));
	int wrote = errno_of(pwrite(unsaved.fd, record, RECORD, 0)), synced = errno_of(fsync(unsaved.fd));
	fill(record, clean.name, 1, ++version);
	int went_on = errno_of(pwrite(clean.fd, record, RECORD, RECORD)), still = errno_of(fsync(clean.fd));
	int of_lock = errno_of(pwrite(locked.fd, record, RECORD, 0));
	note("look reader %d %d unsaved %d %d clean %d %d locked %d .\n", read_it, sync_it, wrote, synced, went_on, still,
	     of_lock);
	close(reader), close(unsaved.fd), close(clean.fd), close(locked.fd);
	keep();
}

static void on_signal(int number)
{
	is_to_look = number;
}

static int run(const char *path)
{
	static struct file files[FILES + 2];
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
	sigaction(SIGUSR1, &action, NULL);
	notes = open("/dev/ttyS0", O_WRONLY | O_NOCTTY);
	mkdir(path, 0755);
	directory = open(path, O_RDONLY | O_DIRECTORY);
	if (notes < 0 || directory < 0)
		return 2;
	srandom(version);
	keep();
	for (int i = 0; i < FILES + 2; i++) {
		sprintf(files[i].name, i < FILES ? "f%d" : i == FILES ? "sync" : "map", i);
		files[i].flags = O_RDWR | (i == FILES ? O_SYNC : 0);
		begin(&files[i]);
	}
	map(&files[FILES + 1]);
	/* The names, and the length of the mapped file. */
	if (fsync(directory) || fsync(files[FILES + 1].fd))
		return 2;
	for (unsigned turn = 0;; turn++) {
		char name[16];
		struct file *file = &files[random() % (FILES + 2)];
		switch (random() % 16) {
		case 0:
			make("renamed", "renamed.new");
			break;
		case 1:
			sprintf(name, "new%lu", version);
			make(name, name);
			break;
		case 2: case 3: case 4: case 5:
			save(file);
			break;
		default:
			put(file);
		}
		if (is_to_look) {
			is_to_look = 0;
			look();
		}
		usleep(2000);
	}
}

static int read_all(const char *path)
{
	DIR *dir = opendir(path);
	for (struct dirent *entry; dir && (entry = readdir(dir));) {
		char file[512], record[RECORD], wanted[RECORD] = "", name[32];
		snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
		FILE *from = entry->d_name[0] == '.' ? NULL : fopen(file, "r");
		for (int slot = 0, there; from && fread(record, RECORD, 1, from) == 1; slot++) {
			static const char empty[RECORD];
			if (!memcmp(record, empty, RECORD))
				continue;
			if (sscanf(record, "%31s %d %lu", name, &there, &version) == 3)
				fill(wanted, name, slot, version);
			if (memcmp(record, wanted, RECORD) || there != slot || strncmp(name, entry->d_name, strlen(name)))
				printf("%s %d BAD\n", entry->d_name, slot);
			else
				printf("%s %d %lu\n", entry->d_name, slot, version);
		}
		if (from)
			fclose(from);
	}
	return dir ? 0 : 2;
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	if (!strcmp(argv[1], "read"))
		return read_all(argv[2]);
	if (!strcmp(argv[1], "lock")) {
		struct flock lock = { .l_type = F_WRLCK };
		int fd = open(argv[2], O_RDWR);
		puts(fcntl(fd, F_SETLK, &lock) ? errno == EAGAIN ? "taken" : "wrong" : "free");
		return 0;
	}
	version = strtoul(argv[2], NULL, 10);
	return run(argv[1]);
}
