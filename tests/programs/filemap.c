/* Proves: a private mapping of a file: unmodified pages show the file, modified ones the
 * program's own data, and the file itself is unchanged. */
#include "program.h"
#include <sys/mman.h>

enum { PAGE = 4096, PAGES = 64 };

static void expect(const unsigned char *at, int page, bool changed)
{
	const unsigned char *p = at + page * PAGE;
	CHECK_IS(p[0], page);
	CHECK_IS(p[1], changed ? 0xaa : 0x55);
	CHECK_IS(p[PAGE - 1], (page * 7) & 0xff);
}

int main(void)
{
	enter_scratch();
	static unsigned char block[PAGE];
	int fd = open("mapped", O_RDWR | O_CREAT | O_EXCL, 0600);
	CHECK(fd >= 0);
	for (int page = 0; page < PAGES; page++) {
		memset(block, page ^ 0x33, PAGE);
		block[0] = (unsigned char)page, block[1] = 0x55, block[PAGE - 1] = (unsigned char)(page * 7);
		CHECK_IS(write(fd, block, PAGE), PAGE);
	}
	/* the last page of the file is partial */
	CHECK_IS(write(fd, "tail", 4), 4);

	unsigned char *writable = mmap(NULL, (PAGES + 1) * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	unsigned char *readable = mmap(NULL, PAGES * PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
	CHECK(writable != MAP_FAILED && readable != MAP_FAILED);
	for (int page = 0; page < PAGES; page += 3)
		writable[page * PAGE + 1] = 0xaa;
	do {
		for (int page = 0; page < PAGES; page++) {
			expect(writable, page, page % 3 == 0);
			expect(readable, page, false);
			CHECK_IS(pread(fd, block, PAGE, page * PAGE), PAGE);
			expect(block - page * PAGE, page, false);
		}
		CHECK(memcmp(writable + PAGES * PAGE, "tail\0\0\0\0", 8) == 0);
		/* mapped and unmapped while away, from an offset */
		unsigned char *again = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 5 * PAGE);
		CHECK(again != MAP_FAILED);
		expect(again - 5 * PAGE, 5, false);
		again[1] = 0xaa;
		expect(again - 5 * PAGE, 5, true);
		CHECK_IS(munmap(again, PAGE), 0);
		/* dropped: the file's content again */
		CHECK_IS(madvise(writable, PAGE, MADV_DONTNEED), 0);
		expect(writable, 0, false);
		writable[1] = 0xaa;
	} while (going());
	CHECK_IS(close(fd), 0);
	expect(readable, 9, false); /* the mapping outlives the descriptor */
	CHECK_IS(unlink("mapped"), 0);
	expect(writable, 10, false);
	leave_scratch();
	return pass();
}
