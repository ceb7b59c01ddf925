/* Proves: what a program maps shared and may write is one memory, wherever it is mapped: a file with
 * content, with holes, and a large one; a segment, a semaphore and a memfd; mapped twice, by a child
 * too, and read-only by a descriptor for writing; read, written and truncated by descriptors; used by
 * another thread meanwhile; written to the disk; and complete in the file at the end. */
#include "program.h"
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <sys/mman.h>

enum { PAGE = 4096, LARGE = 5 << 20 };

static char *map(int fd, int protection, size_t length, off_t from)
{
	char *at = mmap(NULL, length, protection, MAP_SHARED, fd, from);
	CHECK(at != MAP_FAILED);
	return at;
}

static int create(const char *name, size_t size)
{
	int fd = open(name, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	CHECK(fd >= 0);
	CHECK_IS(ftruncate(fd, (off_t)size), 0);
	return fd;
}

static void file_with_content(void)
{
	char seen[16];
	int fd = create("content", 3 * PAGE);
	CHECK_IS(pwrite(fd, "before", 6, 100), 6);
	char *at = map(fd, PROT_READ | PROT_WRITE, 2 * PAGE, 0);
	CHECK_IS(memcmp(at + 100, "before", 7), 0);
	memcpy(at + PAGE, "first", 6);
	char *again = map(fd, PROT_READ | PROT_WRITE, 2 * PAGE, PAGE);
	CHECK_IS(memcmp(again, "first", 6), 0);
	memcpy(again + PAGE, "last", 5);
	CHECK_IS(close(fd), 0);
	at[100] = 'B';
	/* another description: first with the mappings, then after them */
	fd = open("content", O_RDWR);
	CHECK_IS(pread(fd, seen, 6, 100), 6);
	CHECK_IS(memcmp(seen, "Before", 6), 0);
	CHECK_IS(pwrite(fd, "A", 1, 101), 1);
	CHECK_IS(at[101], 'A');
	CHECK_IS(msync(at, PAGE, MS_SYNC), 0);
	CHECK_IS(munmap(at, 2 * PAGE), 0);
	again[0] = 'F';
	CHECK_IS(munmap(again, 2 * PAGE), 0);
	CHECK_IS(close(fd), 0);
	fd = open("content", O_RDONLY);
	CHECK_IS(pread(fd, seen, 6, PAGE), 6);
	CHECK_IS(memcmp(seen, "First", 6), 0);
	CHECK_IS(pread(fd, seen, 5, 2 * PAGE), 5);
	CHECK_IS(memcmp(seen, "last", 5), 0);
	CHECK_IS(close(fd), 0);
}

/* As LMDB does: the mapping is read-only, and a descriptor writes. */
static void read_only(void)
{
	int fd = create("database", PAGE);
	char *at = map(fd, PROT_READ, PAGE, 0);
	for (char letter = 'a'; letter < 'd'; letter++) {
		CHECK_IS(pwrite(fd, &letter, 1, 7), 1);
		CHECK_IS(at[7], letter);
	}
	CHECK_IS(mprotect(at, PAGE, PROT_READ | PROT_WRITE), 0);
	at[8] = 'x';
	char seen;
	CHECK_IS(pread(fd, &seen, 1, 8), 1);
	CHECK_IS(seen, 'x');
	/* it shrinks and grows */
	CHECK_IS(ftruncate(fd, 0), 0);
	CHECK_IS(ftruncate(fd, 2 * PAGE), 0);
	CHECK_IS(at[8], 0);
	CHECK_IS(munmap(at, PAGE), 0);
	CHECK_IS(close(fd), 0);
}

/* A private mapping of the same file sees what it has not yet copied. */
static void private_and_shared(void)
{
	int fd = create("twice", PAGE);
	char *own = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	CHECK(own != MAP_FAILED);
	own[0] = 'o';
	char *at = map(fd, PROT_READ | PROT_WRITE, PAGE, 0);
	CHECK_IS(at[0], 0);
	at[0] = 's';
	CHECK_IS(own[0], 'o');
	char *later = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
	CHECK(later != MAP_FAILED);
	CHECK_IS(later[0], 's');
	CHECK_IS(munmap(own, PAGE) | munmap(at, PAGE) | munmap(later, PAGE) | close(fd), 0);
	fd = create("twice", PAGE);
	at = map(fd, PROT_READ | PROT_WRITE, PAGE, 0);
	at[0] = 't';
	later = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
	CHECK(later != MAP_FAILED);
	CHECK_IS(later[0], 't');
	CHECK_IS(munmap(at, PAGE) | munmap(later, PAGE) | close(fd), 0);
}

static void memory_without_a_disk(void)
{
	char name[64], seen[3];
	snprintf(name, sizeof name, "/tern-mappedaway-%d", (int)getpid());
	sem_t *turn = sem_open(name, O_CREAT | O_EXCL, 0600, 3);
	CHECK(turn != SEM_FAILED);
	CHECK_IS(sem_unlink(name), 0);
	int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
	CHECK(fd >= 0 && ftruncate(fd, 16 * PAGE) == 0);
	_Atomic int *sum = (_Atomic int *)map(fd, PROT_READ | PROT_WRITE, 16 * PAGE, 0);
	CHECK_IS(close(fd), 0);
	fd = memfd_create("mappedaway", 0);
	CHECK(fd >= 0 && ftruncate(fd, PAGE) == 0);
	char *nameless = map(fd, PROT_READ | PROT_WRITE, PAGE, 0);
	pid_t children[3];
	for (int which = 0; which < 3; which++) {
		children[which] = fork();
		CHECK(children[which] >= 0);
		if (children[which] == 0) {
			CHECK_IS(sem_wait(turn), 0);
			for (int n = 0; n < 1000; n++)
				atomic_fetch_add(sum, 1);
			nameless[which] = (char)('a' + which);
			_exit(0);
		}
	}
	for (int which = 0; which < 3; which++) {
		int status;
		CHECK_IS(waitpid(children[which], &status, 0), children[which]);
		CHECK_IS(status, 0);
	}
	CHECK_IS(*sum, 3000);
	CHECK_IS(sem_trywait(turn), -1);
	CHECK_IS(pread(fd, seen, 3, 0), 3);
	CHECK_IS(memcmp(seen, "abc", 3), 0);
	CHECK_IS(sem_close(turn) | shm_unlink(name) | close(fd), 0);
	CHECK_IS(munmap((void *)sum, 16 * PAGE) | munmap(nameless, PAGE), 0);
}

static void large_and_sparse(void)
{
	static char all[LARGE];
	int fd = create("large", LARGE);
	memset(all, 'l', LARGE);
	CHECK_IS(pwrite(fd, all, LARGE, 0), LARGE);
	char *at = map(fd, PROT_READ | PROT_WRITE, LARGE, 0);
	CHECK_IS(at[LARGE - 1], 'l');
	at[0] = 'L';
	CHECK_IS(munmap(at, LARGE) | close(fd), 0);
	fd = create("large", LARGE);
	at = map(fd, PROT_READ | PROT_WRITE, LARGE, 0);
	CHECK_IS(at[0], 0);
	at[LARGE - 1] = 's';
	CHECK_IS(munmap(at, LARGE), 0);
	CHECK_IS(pread(fd, all, LARGE, 0), LARGE);
	CHECK_IS(all[LARGE - 1], 's');
	CHECK_IS(all[0], 0);
	CHECK_IS(close(fd), 0);
}

static int written_fd;
static _Atomic int written;

static void *writer(void *rest)
{
	for (int at = 0; at < 200; at++) {
		CHECK_IS(pwrite(written_fd, "w", 1, at), 1);
		written = at + 1;
	}
	return rest;
}

static void while_a_thread_writes(void)
{
	pthread_t thread;
	written_fd = create("threads", PAGE);
	written = 0;
	CHECK_IS(pthread_create(&thread, NULL, writer, NULL), 0);
	char *at = map(written_fd, PROT_READ | PROT_WRITE, PAGE, 0);
	for (int until; (until = written) < 200;)
		CHECK(until == 0 || at[until - 1] == 'w');
	CHECK_IS(pthread_join(thread, NULL), 0);
	for (int each = 0; each < 200; each++)
		CHECK_IS(at[each], 'w');
	CHECK_IS(munmap(at, PAGE) | close(written_fd), 0);
}

int main(void)
{
	static const char *const files[] = { "content", "database", "twice", "large", "threads" };
	enter_scratch();
	do {
		file_with_content();
		read_only();
		private_and_shared();
		memory_without_a_disk();
		large_and_sparse();
		while_a_thread_writes();
	} while (going());
	for (unsigned each = 0; each < sizeof files / sizeof *files; each++)
		CHECK_IS(unlink(files[each]), 0);
	leave_scratch();
	return pass();
}
