/* Proves: the views of a program's own memory: /proc/self/maps (its mappings, heap and stack)
 * and smaps, the use that pthread_getattr_np makes of them, the size in statm, stat and status.
 * With the argument "reach" also access to it by /proc/self/map_files, /proc/self/mem,
 * process_vm_readv and process_vm_writev. */
#include "program.h"
#include <dirent.h>
#include <limits.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/uio.h>

enum { PAGE = 4096, PAGES = 2000 };

static const char *mapping_of(const void *p, const char *prot)
{
	static char line[512], wanted[8];
	uintptr_t start, end, at = (uintptr_t)p;
	FILE *maps = fopen("/proc/self/maps", "r");
	CHECK(maps != NULL);
	bool found = false;
	while (!found && fgets(line, sizeof line, maps)) {
		CHECK_IS(sscanf(line, "%lx-%lx %7s", &start, &end, wanted), 3);
		found = start <= at && at < end;
	}
	fclose(maps);
	CHECK(found);
	if (strcmp(wanted, prot) != 0)
		fail("FAIL %s is not %s\n", line, prot);
	return line;
}

static long field(const char *name)
{
	char line[256];
	long value = -1;
	FILE *status = fopen("/proc/self/status", "r");
	CHECK(status != NULL);
	while (fgets(line, sizeof line, status))
		if (strncmp(line, name, strlen(name)) == 0)
			value = atol(line + strlen(name) + 1);
	fclose(status);
	return value;
}

/* Resident size: in pages by statm, and by stat, which is approximate; in KiB by status, and by
 * smaps for the block alone. */
struct sizes {
	long size, pages, rough, vm_size, vm_rss, block;
};

static struct sizes look(const char *block)
{
	struct sizes s = { .vm_size = field("VmSize"), .vm_rss = field("VmRSS") };
	FILE *statm = fopen("/proc/self/statm", "r");
	CHECK(statm != NULL);
	CHECK_IS(fscanf(statm, "%ld %ld", &s.size, &s.pages), 2);
	fclose(statm);
	/* field 24 of stat; and a mapping's name is still that of the file */
	static char text[4096], name[64], link[256];
	int fd = open("/proc/thread-self/stat", O_RDONLY | O_CLOEXEC);
	CHECK(fd >= 0);
	ssize_t n = read(fd, text, sizeof text - 1);
	CHECK(n > 0 && read(fd, text, 1) == 0);
	text[n] = 0;
	char *at = strrchr(text, ')');
	for (int i = 2; i < 24; i++)
		CHECK((at = strchr(at + 1, ' ')) != NULL);
	s.rough = atol(at);
	CHECK_IS(fcntl(fd, F_GETFD), FD_CLOEXEC);
	snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
	CHECK((n = readlink(name, link, sizeof link - 1)) > 0);
	link[n] = 0;
	CHECK(strstr(link, "/stat") != NULL);
	close(fd);
	FILE *smaps = fopen("/proc/self/smaps", "r");
	CHECK(smaps != NULL);
	uintptr_t start = 0, end;
	while (fgets(text, sizeof text, smaps)) {
		uintptr_t from;
		if (sscanf(text, "%lx-%lx ", &from, &end) == 2)
			start = from;
		if (start == (uintptr_t)block + PAGE && strncmp(text, "Rss:", 4) == 0)
			s.block = atol(text + 4);
	}
	fclose(smaps);
	return s;
}

/* All of the block, and little else. */
static bool plausible(struct sizes s)
{
	return s.pages > PAGES * 3 / 4 && s.pages < PAGES + 4000 && s.size > s.pages && s.rough > PAGES * 3 / 4 &&
	       s.rough < PAGES + 4000 && s.vm_rss > PAGES * 3 && s.vm_rss < PAGES * 4 + 16000 &&
	       s.vm_size >= s.size * 4 - 1000 && s.block >= (PAGES - 1) * 4;
}

/* Reads and writes through other interfaces. */
/* Whether the file that is mapped at this address is among the process's mapped files. */
static bool is_mapped_file(const void *at)
{
	uintptr_t start, end;
	bool found = false;
	DIR *all = opendir("/proc/self/map_files");
	CHECK(all != NULL);
	for (struct dirent *entry; !found && (entry = readdir(all)) != NULL;)
		found = sscanf(entry->d_name, "%lx-%lx", &start, &end) == 2 && start == (uintptr_t)at;
	closedir(all);
	return found;
}

static void reach(char *block)
{
	int program = open("/proc/self/exe", O_RDONLY);
	char *file = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, program, 0);
	CHECK(file != MAP_FAILED);
	char link[64], by_mapping[PATH_MAX], by_program[PATH_MAX];
	snprintf(link, sizeof link, "/proc/self/map_files/%lx-%lx", (long)file, (long)file + PAGE);
	ssize_t length = readlink(link, by_mapping, sizeof by_mapping);
	CHECK(length > 0);
	CHECK_IS(readlink("/proc/self/exe", by_program, sizeof by_program), length);
	CHECK(memcmp(by_mapping, by_program, (size_t)length) == 0);
	CHECK(is_mapped_file(file));
	CHECK(munmap(file, PAGE) == 0 && close(program) == 0);

	int mem = open("/proc/self/mem", O_RDWR);
	CHECK(mem >= 0);
	char got[16];
	memset(got, 0, sizeof got);
	CHECK_IS(pread(mem, got, 16, (off_t)(uintptr_t)(block + 7 * PAGE)), 16);
	CHECK(got[0] == 0x42 && got[15] == 0x42);
	CHECK_IS(pwrite(mem, "written", 8, (off_t)(uintptr_t)(block + 8 * PAGE)), 8);
	CHECK(strcmp(block + 8 * PAGE, "written") == 0);
	close(mem);

	struct iovec mine = { got, 8 }, there = { block + 8 * PAGE, 8 };
	CHECK_IS(process_vm_readv(getpid(), &mine, 1, &there, 1, 0), 8);
	CHECK(memcmp(got, "written", 8) == 0);
	there.iov_base = block + 9 * PAGE;
	CHECK_IS(process_vm_writev(getpid(), &mine, 1, &there, 1, 0), 8);
	CHECK(strcmp(block + 9 * PAGE, "written") == 0);
}

int main(int argc, char **argv)
{
	bool reaches = argc > 1 && strcmp(argv[1], "reach") == 0;
	char *block = NULL;
	int on_stack = 0;
	void *stack;
	size_t stack_size;
	pthread_attr_t attributes;
	do {
		/* new in each round, so that it is mapped wherever the program is */
		block = mmap(block, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | (block ? MAP_FIXED : 0),
			     -1, 0);
		CHECK(block != MAP_FAILED);
		CHECK_IS(mprotect(block, PAGE, PROT_NONE), 0);
		memset(block + PAGE, 0x42, (PAGES - 1) * PAGE);
		mapping_of(block, "---p");
		mapping_of(block + 5 * PAGE, "rw-p");
		char *heap = malloc(100);
		CHECK(heap != NULL);
		mapping_of(heap, "rw-p");
		free(heap);
		CHECK(strstr(mapping_of(&on_stack, "rw-p"), "[stack]") != NULL);
		CHECK_IS(pthread_getattr_np(pthread_self(), &attributes), 0);
		CHECK_IS(pthread_attr_getstack(&attributes, &stack, &stack_size), 0);
		CHECK((char *)&on_stack >= (char *)stack && (char *)&on_stack < (char *)stack + stack_size);
		pthread_attr_destroy(&attributes);

		/* If the program leaves home between the open and the read of such a file, the file
		 * shows the deputy, whose memory is empty (docs/reference/limits.md). A file that
		 * is opened again does not. */
		struct sizes s = look(block);
		for (int i = 0; i < 4 && !plausible(s); i++)
			s = look(block);
		if (!plausible(s))
			fail("FAIL: %ld of %ld pages, roughly %ld, %ld of %ld KiB, %ld of the block\n", s.pages, s.size, s.rough,
			     s.vm_rss, s.vm_size, s.block);
		CHECK_IS(field("Threads"), 1);
		if (reaches)
			reach(block);
		rest_ms(20);
	} while (going());
	return pass();
}
