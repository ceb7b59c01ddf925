/* Proves: read, write, lseek, append, truncate, pread and pwrite, compared with a model of the
 * file in memory. */
#include "program.h"
#include <sys/uio.h>

enum { MOST = 1 << 20 };
static unsigned char model[MOST], buffer[MOST];

int main(void)
{
	enter_scratch();
	int fd = open("file", O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0640);
	CHECK(fd >= 0);
	uint64_t random = 7;
	off_t size = 0, at = 0;
	do {
		for (int step = 0; step < 200; step++) {
			size_t length = next_random(&random) % 9000 + 1;
			off_t place = (off_t)(next_random(&random) % (MOST - 9000));
			for (size_t i = 0; i < length; i++)
				buffer[i] = (unsigned char)(length + i * 31 + (size_t)step);
			switch (next_random(&random) % 7) {
			case 0: /* write at the offset */
				if (at + (off_t)length > MOST)
					at = lseek(fd, 0, SEEK_SET);
				CHECK_IS(write(fd, buffer, length), length);
				memcpy(model + at, buffer, length);
				at += (off_t)length;
				size = at > size ? at : size;
				break;
			case 1: /* read at the offset */
				length = at >= size ? 0 : (off_t)length > size - at ? (size_t)(size - at) : length;
				CHECK_IS(read(fd, buffer, 9001 < length ? 9001 : length), length);
				CHECK(memcmp(buffer, model + at, length) == 0);
				at += (off_t)length;
				break;
			case 2:
				CHECK_IS(pwrite(fd, buffer, length, place), length);
				memcpy(model + place, buffer, length);
				size = place + (off_t)length > size ? place + (off_t)length : size;
				break;
			case 3:
				memset(buffer, 0xee, length);
				CHECK_IS(pread(fd, buffer, length, place),
					 place >= size ? 0 : place + (off_t)length > size ? size - place : (off_t)length);
				if (place + (off_t)length <= size)
					CHECK(memcmp(buffer, model + place, length) == 0);
				break;
			case 4: /* seek, relative to each of the three */
				CHECK_IS(lseek(fd, place, SEEK_SET), place);
				CHECK_IS(lseek(fd, -place, SEEK_CUR), 0);
				CHECK_IS(lseek(fd, 0, SEEK_END), size);
				at = lseek(fd, place, SEEK_SET);
				break;
			case 5: /* shorter, or longer with a hole */
				CHECK_IS(ftruncate(fd, place), 0);
				if (place < size)
					memset(model + place, 0, (size_t)(size - place));
				size = place;
				break;
			case 6: { /* vectors */
				struct iovec parts[3] = { { buffer, length / 3 },
							  { buffer + length / 3, 0 },
							  { buffer + length / 3, length - length / 3 } };
				CHECK_IS(pwritev(fd, parts, 3, place), length);
				memcpy(model + place, buffer, length);
				size = place + (off_t)length > size ? place + (off_t)length : size;
				memset(buffer, 0, length);
				CHECK_IS(preadv(fd, parts, 3, place), length);
				CHECK(memcmp(buffer, model + place, length) == 0);
			}
			}
		}
		struct stat about;
		CHECK_IS(fstat(fd, &about), 0);
		CHECK_IS(about.st_size, size);
		CHECK_IS(lseek(fd, 0, SEEK_CUR), at);
		CHECK_IS(pread(fd, buffer, MOST, 0), size);
		CHECK(memcmp(buffer, model, (size_t)size) == 0);

		int end = open("file", O_WRONLY | O_APPEND);
		CHECK(end >= 0);
		if (size < MOST - 8) {
			CHECK_IS(write(end, "appended", 8), 8);
			memcpy(model + size, "appended", 8);
			size += 8;
		}
		CHECK_IS(close(end), 0);
	} while (going());
	CHECK_IS(close(fd), 0);
	CHECK_IS(write(fd, "x", 1), -1);
	CHECK_IS(errno, EBADF);
	CHECK_IS(unlink("file"), 0);
	CHECK_IS(open("file", O_RDONLY), -1);
	CHECK_IS(errno, ENOENT);
	leave_scratch();
	return pass();
}
