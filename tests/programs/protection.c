/* Proves: what a mapping of a file may become goes by how the file was opened, wherever it is mapped:
 * a shared mapping of a file that may be written can be made writable, and then shows the file. */
#include "program.h"
#include <sys/mman.h>

enum { PAGE = 4096 };

/* Maps, with these flags, a file that was opened so. Returns whether it could be made writable. */
static bool writable(const char *path, int access, int flags)
{
	int fd = open(path, access);
	CHECK(fd >= 0);
	char *at = mmap(NULL, PAGE, PROT_READ, flags, fd, 0);
	CHECK(at != MAP_FAILED);
	bool zeroes = path[0] == '/';
	CHECK(at[0] == (zeroes ? 0 : 'a'));
	bool done = mprotect(at, PAGE, PROT_READ | PROT_WRITE) == 0;
	CHECK(done || errno == EACCES);
	if (done) {
		char byte;
		at[0] = 'b';
		CHECK_IS(pread(fd, &byte, 1, 0), 1);
		CHECK_IS(byte, zeroes ? 0 : flags == MAP_SHARED ? 'b' : 'a');
		at[0] = 'a';
		CHECK_IS(at[0], 'a');
	}
	CHECK_IS(close(fd), 0);
	CHECK_IS(munmap(at, PAGE), 0);
	return done;
}

int main(void)
{
	enter_scratch();
	char content[PAGE] = "a";
	int fd = open("file", O_RDWR | O_CREAT, 0600);
	CHECK(fd >= 0);
	CHECK_IS(write(fd, content, PAGE), PAGE);
	do {
		const char *paths[] = { "file", "/dev/zero" };
		for (int i = 0; i < 2; i++) {
			CHECK(writable(paths[i], O_RDONLY, MAP_PRIVATE));
			CHECK(writable(paths[i], O_RDWR, MAP_PRIVATE));
			/* a process with such a mapping of the device stays at home */
			CHECK(i == 1 || !writable(paths[i], O_RDONLY, MAP_SHARED));
			CHECK(writable(paths[i], O_RDWR, MAP_SHARED));
		}
		/* what the program writes by a call shows in a shared mapping that it only reads */
		char *at = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0);
		CHECK(at != MAP_FAILED);
		CHECK_IS(pwrite(fd, "c", 1, 1), 1);
		CHECK_IS(at[1], 'c');
		CHECK_IS(pwrite(fd, "d", 1, 1), 1);
		CHECK_IS(at[1], 'd');
		CHECK_IS(munmap(at, PAGE), 0);
		rest_ms(1);
	} while (going());
	CHECK_IS(close(fd), 0);
	CHECK_IS(unlink("file"), 0);
	leave_scratch();
	return pass();
}
