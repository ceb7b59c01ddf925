/* Proves: flock and fcntl locks, held and waited for, between related processes and between two
 * open file descriptions. */
#include "program.h"
#include <sys/file.h>

static int set_lock(int fd, int command, short type, off_t start, off_t length)
{
	struct flock lock = { .l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = length };
	return fcntl(fd, command, &lock);
}

int main(void)
{
	enter_scratch();
	int fd = open("lock", O_RDWR | O_CREAT, 0600), other = open("lock", O_RDWR);
	CHECK(fd >= 0 && other >= 0);
	int ready[2], go[2];
	do {
		/* a flock belongs to the open file description */
		CHECK_IS(flock(fd, LOCK_EX), 0);
		CHECK_IS(flock(other, LOCK_EX | LOCK_NB), -1);
		CHECK_IS(errno, EWOULDBLOCK);
		CHECK_IS(flock(fd, LOCK_SH), 0);
		CHECK_IS(flock(other, LOCK_SH | LOCK_NB), 0);
		CHECK_IS(flock(fd, LOCK_UN), 0);
		CHECK_IS(flock(other, LOCK_UN), 0);

		/* an fcntl lock belongs to the process: a child is blocked by its parent's, and the
		 * parent waits for the child's */
		CHECK(pipe(ready) == 0 && pipe(go) == 0);
		CHECK_IS(set_lock(fd, F_SETLK, F_WRLCK, 0, 100), 0);
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			struct flock about = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 50, .l_len = 1 };
			CHECK_IS(fcntl(fd, F_GETLK, &about), 0);
			CHECK_IS(about.l_type, F_WRLCK);
			CHECK_IS(about.l_pid, getppid());
			CHECK_IS(set_lock(fd, F_SETLK, F_WRLCK, 99, 1), -1);
			CHECK(errno == EAGAIN || errno == EACCES);
			CHECK_IS(set_lock(fd, F_SETLK, F_WRLCK, 100, 1), 0);
			CHECK_IS(write(ready[1], "r", 1), 1);
			char byte;
			CHECK_IS(read(go[0], &byte, 1), 1);
			rest_ms(60);
			_exit(0);
		}
		char byte;
		CHECK_IS(read(ready[0], &byte, 1), 1);
		CHECK_IS(set_lock(fd, F_SETLK, F_WRLCK, 100, 1), -1);
		CHECK_IS(write(go[1], "g", 1), 1);
		CHECK_IS(set_lock(fd, F_SETLKW, F_WRLCK, 100, 1), 0); /* granted when the child ends */
		await_exit(child, 0);
		CHECK_IS(set_lock(fd, F_SETLK, F_UNLCK, 0, 0), 0);
		close(ready[0]), close(ready[1]), close(go[0]), close(go[1]);
	} while (going());
	CHECK_IS(unlink("lock"), 0);
	leave_scratch();
	return pass();
}
