/* Proves: data that moves between descriptors: splice, tee, vmsplice, sendfile, copy_file_range,
 * preadv2 and pwritev2; and transfers larger than one message between nodes, which are complete. */
#include "program.h"
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>

static void fill(int fd, const char *text)
{
	CHECK_IS(ftruncate(fd, 0), 0);
	CHECK_IS(pwrite(fd, text, strlen(text), 0), (ssize_t)strlen(text));
	CHECK_IS(lseek(fd, 0, SEEK_SET), 0);
}

static void expect(int fd, const char *text)
{
	char got[64];
	size_t length = strlen(text), have = 0;
	while (have < length) {
		ssize_t n = read(fd, got + have, length - have);
		CHECK(n > 0);
		have += (size_t)n;
	}
	CHECK(memcmp(got, text, length) == 0);
}

static void between(void)
{
	int a = open("a", O_RDWR | O_CREAT | O_TRUNC, 0600), b = open("b", O_RDWR | O_CREAT | O_TRUNC, 0600), ends[2],
	    other[2], pair[2];
	CHECK(a >= 0 && b >= 0 && pipe(ends) == 0 && pipe(other) == 0);
	CHECK_IS(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
	fill(a, "0123456789abcdef");
	off_t from = 4, to = 2;
	CHECK_IS(splice(a, &from, ends[1], NULL, 6, 0), 6);
	CHECK_IS(from, 10);
	CHECK_IS(lseek(a, 0, SEEK_CUR), 0);
	CHECK_IS(tee(ends[0], other[1], 100, 0), 6); /* copied, not consumed */
	CHECK_IS(splice(ends[0], NULL, pair[0], NULL, 100, SPLICE_F_MORE), 6);
	expect(pair[1], "456789"), expect(other[0], "456789");
	CHECK_IS(splice(a, NULL, ends[1], NULL, 3, 0), 3);
	CHECK_IS(lseek(a, 0, SEEK_CUR), 3);
	CHECK_IS(splice(ends[0], NULL, b, &to, 3, 0), 3);
	CHECK_IS(to, 5);
	CHECK_IS(splice(ends[0], NULL, b, NULL, 3, SPLICE_F_NONBLOCK), -1);
	CHECK_IS(errno, EAGAIN);
	CHECK_IS(tee(ends[0], other[1], 3, SPLICE_F_NONBLOCK), -1);
	CHECK_IS(errno, EAGAIN);
	CHECK_IS(splice(a, &from, ends[1], &to, 1, 0), -1);
	CHECK_IS(errno, ESPIPE);
	from = 100;
	CHECK_IS(splice(a, &from, ends[1], NULL, 3, 0), 0); /* beyond its end */

	from = 1, to = 0;
	CHECK_IS(copy_file_range(a, &from, b, &to, 4, 0), 4);
	CHECK(from == 5 && to == 4);
	CHECK_IS(copy_file_range(a, NULL, b, NULL, 100, 0), 13);
	CHECK_IS(copy_file_range(a, NULL, b, NULL, 100, 0), 0);
	CHECK_IS(lseek(b, 0, SEEK_CUR), 13);
	CHECK_IS(lseek(a, 0, SEEK_SET), 0);
	CHECK_IS(sendfile(b, a, NULL, 2), 2); /* file to file */
	CHECK_IS(pread(b, (char[20]){ 0 }, 20, 0), 15);
	char text[20] = "";
	CHECK_IS(pread(b, text, 20, 0), 15);
	CHECK(strncmp(text, "3456789abcdef01", 15) == 0);

	/* vmsplice may reference or copy the pages: in both cases the pipe has their content */
	static int round;
	struct iovec parts[3] = { { "ab", 2 }, { NULL, 0 }, { "cde", 3 } };
	if (++round == 20) { /* vmsplice brings the process home; many such calls would keep it there */
		CHECK_IS(vmsplice(ends[1], parts, 3, 0), 5);
		expect(ends[0], "abcde");
	}

	/* a child consumes what one splice waits for, and provides what another waits for */
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		rest_ms(30);
		CHECK_IS(write(ends[1], "late", 4), 4);
		_exit(0);
	}
	CHECK_IS(splice(ends[0], NULL, pair[0], NULL, 100, 0), 4);
	expect(pair[1], "late");
	await_exit(child, 0);
	close(a), close(b), close(ends[0]), close(ends[1]), close(other[0]), close(other[1]), close(pair[0]), close(pair[1]);
}

static void vectors(void)
{
	int a = open("a", O_RDWR | O_CREAT | O_TRUNC, 0600);
	char one[4] = "", two[8] = "";
	struct iovec out[2] = { { "vec", 3 }, { "torial", 6 } }, in[2] = { { one, 3 }, { two, 7 } };
	CHECK_IS(pwritev2(a, out, 2, 2, RWF_DSYNC), 9);
	CHECK_IS(lseek(a, 0, SEEK_CUR), 0);
	CHECK_IS(pwritev2(a, out, 1, -1, 0), 3); /* at the current offset, which advances */
	CHECK_IS(lseek(a, 0, SEEK_CUR), 3);
	CHECK_IS(pwritev2(a, out, 1, 0, RWF_APPEND), 3);
	CHECK_IS(preadv2(a, in, 2, 1, 0), 10);
	CHECK(memcmp(one, "ece", 3) == 0 && memcmp(two, "ctorial", 7) == 0);
	CHECK_IS(preadv2(a, in, 1, -1, 0), 3);
	CHECK_IS(lseek(a, 0, SEEK_CUR), 6);
	/* At the end of the file, where the current offset then is. */
	CHECK_IS(lseek(a, 1, SEEK_SET), 1);
	CHECK_IS(pwritev2(a, out, 1, -1, RWF_APPEND), 3);
	CHECK_IS(lseek(a, 0, SEEK_CUR), 17);
	CHECK_IS(write(a, "!", 1), 1);
	CHECK_IS(lseek(a, 0, SEEK_END), 18);
	CHECK_IS(lseek(a, 6, SEEK_SET), 6);
	CHECK_IS(preadv(a, in, 2, 100), 0);
	int ends[2];
	CHECK_IS(pipe(ends), 0);
	ssize_t n = preadv2(ends[0], in, 1, -1, RWF_NOWAIT);
	CHECK(n == -1 && errno == EAGAIN);
	CHECK_IS(preadv2(a, in, 1, 0, 1 << 30), -1);
	CHECK_IS(errno, EOPNOTSUPP);
	volatile int negative = -1;
	CHECK_IS(readv(a, in, negative), -1);
	CHECK_IS(errno, EINVAL);
	CHECK_IS(readv(a, in, 0), 0);
	close(a), close(ends[0]), close(ends[1]);
}

/* A bit more than 65 MiB: more than one message between nodes carries. */
static void large(void)
{
	size_t size = (65u << 20) + 12345;
	unsigned char *block = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(block != MAP_FAILED);
	for (size_t i = 0; i < size; i += 4096)
		block[i] = (unsigned char)(i / 4096 * 7);
	int fd = memfd_create("large", MFD_CLOEXEC);
	CHECK_IS(write(fd, block, size), size);
	CHECK_IS(lseek(fd, 0, SEEK_CUR), size);
	CHECK_IS(pwrite(fd, block, size, 3 * 4096), size);
	memset(block, 0xff, size);
	CHECK_IS(lseek(fd, 0, SEEK_SET), 0);
	CHECK_IS(read(fd, block, size), size);
	for (size_t i = 0; i < size; i += 4096)
		CHECK_IS(block[i], (unsigned char)((i < 3 * 4096 ? i : i - 3 * 4096) / 4096 * 7));
	memset(block, 0xff, size);
	CHECK_IS(pread(fd, block, size, 3 * 4096), size);
	for (size_t i = 0; i < size; i += 4096)
		CHECK_IS(block[i], (unsigned char)(i / 4096 * 7));
	close(fd);
	munmap(block, size);
	rest_ms(400); /* a process that only makes forwarded calls would be sent home */
}

int main(int argc, char **argv)
{
	enter_scratch();
	do {
		if (argc > 1 && strcmp(argv[1], "large") == 0) {
			large();
			continue;
		}
		between();
		vectors();
	} while (going());
	unlink("a"), unlink("b");
	leave_scratch();
	return pass();
}
