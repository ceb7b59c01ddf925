/* Proves: two related processes that append to one file with O_APPEND never overwrite each
 * other's records, and two related processes share the offset of one open file. */
#include "program.h"

struct record {
	uint32_t who, count;
	char filling[56];
};

static uint32_t append(int fd, uint32_t who, uint32_t limit)
{
	uint32_t count = 0;
	do {
		struct record r = { who, count, { 0 } };
		memset(r.filling, (int)(who * 16 + count % 16), sizeof r.filling);
		CHECK_IS(write(fd, &r, sizeof r), sizeof r);
		count++;
		rest_ms(1);
	} while (going() && count < limit);
	return count;
}

int main(void)
{
	enter_scratch();
	int fd = open("log", O_RDWR | O_CREAT | O_APPEND, 0600);
	CHECK(fd >= 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		int own = open("log", O_WRONLY | O_APPEND); /* an open file description of its own */
		CHECK(own >= 0);
		append(own, 2, 100000);
		append(fd, 3, 50); /* and then the shared one */
		_exit(0);
	}
	append(fd, 1, 100000);
	await_exit(child, 0);
	uint32_t next[4] = { 0, 0, 0, 0 };
	struct record r;
	off_t at = 0;
	while (pread(fd, &r, sizeof r, at) == sizeof r) {
		CHECK(r.who >= 1 && r.who <= 3);
		CHECK_IS(r.count, next[r.who]++);
		for (size_t i = 0; i < sizeof r.filling; i++)
			CHECK_IS((unsigned char)r.filling[i], r.who * 16 + r.count % 16);
		at += (off_t)sizeof r;
	}
	CHECK(next[1] > 0 && next[2] > 0 && next[3] > 0);
	CHECK_IS(lseek(fd, 0, SEEK_END), at);

	/* one offset, two processes */
	CHECK_IS(lseek(fd, 0, SEEK_SET), 0);
	child = fork();
	CHECK(child >= 0);
	if (child == 0)
		_exit(read(fd, &r, sizeof r) == sizeof r && lseek(fd, 0, SEEK_CUR) == sizeof r ? 0 : 1);
	await_exit(child, 0);
	CHECK_IS(lseek(fd, 0, SEEK_CUR), sizeof r);
	CHECK_IS(unlink("log"), 0);
	leave_scratch();
	return pass();
}
