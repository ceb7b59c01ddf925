/* Proves: file mappings that no other process can see written: /dev/zero, a memfd, read-only shared
 * ones, with MAP_POPULATE, over other memory, beyond a file's end, without access rights; what mmap
 * refuses; and that they outlive their descriptor, their name, and a child. */
#include "program.h"
#include <sys/mman.h>
#include <sys/syscall.h>

enum { PAGE = 4096, PAGES = 8, LEN = PAGE * PAGES };

static unsigned char *map(size_t length, int prot, int flags, int fd, off_t offset)
{
	unsigned char *at = mmap(NULL, length, prot, flags, fd, offset);
	CHECK(at != MAP_FAILED);
	return at;
}

static void refused(int error, size_t length, int prot, int flags, int fd, off_t offset)
{
	CHECK(mmap(NULL, length, prot, flags, fd, offset) == MAP_FAILED);
	CHECK_IS(errno, error);
}

int main(void)
{
	const int both = PROT_READ | PROT_WRITE;
	enter_scratch();
	int file = open("file", O_RDWR | O_CREAT | O_EXCL, 0600);
	CHECK(file >= 0);
	static unsigned char page[PAGE];
	for (int i = 0; i < PAGES; i++) {
		memset(page, i + 1, PAGE);
		CHECK_IS(write(file, page, PAGE), PAGE);
	}
	int readable = open("file", O_RDONLY), writable = open("file", O_WRONLY);
	CHECK(readable >= 0 && writable >= 0);
	unsigned char *kept = map(LEN, PROT_READ, MAP_SHARED, readable, 0);
	uint64_t turn = 0;
	do {
		turn++;
		int zero = open("/dev/zero", O_RDWR);
		CHECK(zero >= 0);
		unsigned char *nothing = map(LEN, both, MAP_PRIVATE, zero, 0);
		CHECK(nothing[0] == 0 && nothing[LEN - 1] == 0);
		memset(nothing, 9, LEN);
		close(zero);

		int memory = (int)syscall(SYS_memfd_create, "memory", 0);
		CHECK(memory >= 0 && ftruncate(memory, LEN) == 0 && pwrite(memory, "in memory", 9, PAGE) == 9);
		unsigned char *own = map(LEN, both, MAP_PRIVATE | MAP_POPULATE, memory, 0);
		CHECK(memcmp(own + PAGE, "in memory", 9) == 0 && own[0] == 0);
		memcpy(own + PAGE, "its own", 7);
		CHECK(pread(memory, page, 9, PAGE) == 9 && memcmp(page, "in memory", 9) == 0);
		close(memory);

		/* shared, but read-only for good */
		unsigned char *shared = map(3 * PAGE, PROT_READ, MAP_SHARED, readable, 2 * PAGE);
		CHECK(shared[0] == 3 && shared[2 * PAGE] == 5 && kept[LEN - 1] == PAGES);
		CHECK_IS(mprotect(shared, PAGE, both), -1);
		CHECK_IS(errno, EACCES);
		CHECK_IS(munmap(shared, 3 * PAGE), 0);

		/* in the middle of other memory, and other memory in the middle of it */
		unsigned char *a = map(LEN, both, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		memset(a, 0x77, LEN);
		CHECK(mmap(a + 2 * PAGE, 4 * PAGE, both, MAP_PRIVATE | MAP_FIXED, file, PAGE) == a + 2 * PAGE);
		CHECK(mmap(a + 3 * PAGE, PAGE, both, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == a + 3 * PAGE);
		a[4 * PAGE] = 0x55;
		for (int look = 0; look < 3; look++) {
			CHECK(a[2 * PAGE - 1] == 0x77 && a[2 * PAGE] == 2 && a[3 * PAGE] == 0 && a[4 * PAGE] == 0x55);
			CHECK(a[4 * PAGE + 1] == 4 && a[5 * PAGE] == 5 && a[6 * PAGE] == 0x77);
			CHECK(nothing[LEN - 1] == 9 && memcmp(own + PAGE, "its ownry", 9) == 0);
			rest_ms(1);
		}
		/* without access rights, which are added later */
		unsigned char *hidden = map(LEN, PROT_NONE, MAP_PRIVATE, readable, 0);
		CHECK_IS(mprotect(hidden + PAGE, PAGE, both), 0);
		CHECK_IS(hidden[PAGE], 2);
		hidden[PAGE] = 1;
		/* the program itself writes to the file: a new mapping has the current content */
		page[0] = (unsigned char)turn;
		CHECK_IS(pwrite(file, page, 1, 3 * PAGE + 7), 1);
		unsigned char *again = map(PAGE, PROT_READ, MAP_PRIVATE, readable, 3 * PAGE);
		CHECK(again[7] == (unsigned char)turn && again[8] == 4);
		CHECK_IS(munmap(again, PAGE), 0);
		/* another file, perhaps with the number of the previous one */
		int other = open("other", O_RDWR | O_CREAT | O_EXCL, 0600);
		CHECK(other >= 0 && ftruncate(other, PAGE) == 0 && pwrite(other, &turn, sizeof turn, 0) == sizeof turn);
		CHECK_IS(unlink("other"), 0);
		uint64_t *number = (uint64_t *)(void *)map(PAGE, both, MAP_PRIVATE, other, 0);
		close(other);
		rest_ms(1);
		CHECK(number[0] == turn && number[1] == 0);
		CHECK_IS(munmap(number, PAGE), 0);
		/* beyond the end there are pages, but no data */
		unsigned char *more = map(2 * LEN, PROT_READ, MAP_PRIVATE, readable, 0);
		unsigned char there[2 * PAGES];
		CHECK(more[LEN - 1] == PAGES && mincore(more, 2 * LEN, there) == 0);
		if (turn % 8 == 1) {
			pid_t child = fork();
			CHECK(child >= 0);
			if (child == 0) {
				CHECK(a[4 * PAGE] == 0x55 && a[4 * PAGE + 1] == 4 && kept[0] == 1 && hidden[PAGE] == 1);
				a[5 * PAGE] = 1;
				_exit(a[5 * PAGE + 1]);
			}
			await_exit(child, 5);
			CHECK_IS(a[5 * PAGE], 5);
		}
		refused(EBADF, PAGE, PROT_READ, MAP_PRIVATE, 999, 0);
		refused(EACCES, PAGE, PROT_READ, MAP_PRIVATE, writable, 0);
		refused(EACCES, PAGE, both, MAP_SHARED, readable, 0);
		refused(EINVAL, PAGE, PROT_READ, MAP_PRIVATE, readable, 100);
		refused(EINVAL, 0, PROT_READ, MAP_PRIVATE, readable, 0);
		refused(EINVAL, PAGE, PROT_READ, 0, readable, 0);
		int folder = open(".", O_RDONLY | O_DIRECTORY);
		refused(ENODEV, PAGE, PROT_READ, MAP_PRIVATE, folder, 0);
		close(folder);
		CHECK(munmap(nothing, LEN) == 0 && munmap(own, LEN) == 0 && munmap(a, LEN) == 0);
		CHECK(munmap(hidden, LEN) == 0 && munmap(more, 2 * LEN) == 0);
	} while (going());
	close(readable);
	CHECK_IS(unlink("file"), 0);
	rest_ms(5);
	CHECK(kept[0] == 1 && kept[LEN - 1] == PAGES);
	leave_scratch();
	return pass();
}
