/* Proves: a call whose stated length is longer than the memory behind it gets what fits, and a call
 * that must write to read-only memory, or names addresses of the kernel, fails, as at home. */
#include "program.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>

enum { PAGE = 4096, ROOM = 256, LIE = 1 << 20 };

int main(void)
{
	enter_scratch();
	char *page = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *constant = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(page != MAP_FAILED && constant != MAP_FAILED);
	CHECK_IS(munmap(page + PAGE, PAGE), 0);
	char *at = page + PAGE - ROOM, rest[8];
	int ends[2], datagrams[2], file = open("file", O_RDWR | O_CREAT, 0600);
	CHECK(pipe2(ends, O_NONBLOCK) == 0 && socketpair(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0, datagrams) == 0);
	CHECK_IS(write(file, "hello", 5), 5);
	int queue = msgget(IPC_PRIVATE, 0600), empty = open("empty", O_RDWR | O_CREAT, 0600);
	CHECK(queue >= 0 && empty >= 0);
	do {
		CHECK_IS(write(ends[1], "hello", 5), 5);
		CHECK_IS(read(ends[0], at, LIE), 5);
		CHECK(memcmp(at, "hello", 5) == 0 && read(ends[0], rest, sizeof rest) == -1);
		CHECK(lseek(file, 0, SEEK_SET) == 0 && read(file, at, LIE) == 5);
		struct iovec vector[2] = { { at, 3 }, { at + 100, LIE } };
		CHECK(lseek(file, 0, SEEK_SET) == 0 && readv(file, vector, 2) == 5);
		CHECK(memcmp(at, "hel", 3) == 0 && memcmp(at + 100, "lo", 2) == 0);
		CHECK_IS(send(datagrams[1], "hello", 5, 0), 5);
		CHECK_IS(recv(datagrams[0], at, LIE, 0), 5);
		CHECK_IS(send(datagrams[1], "hello", 5, 0), 5);
		struct msghdr message = { .msg_iov = vector, .msg_iovlen = 2, .msg_control = at, .msg_controllen = LIE };
		CHECK_IS(recvmsg(datagrams[0], &message, 0), 5);
		CHECK_IS(recv(datagrams[0], rest, sizeof rest, 0), -1);
		struct {
			long type;
			char text[5];
		} sent = { 1, "hello" };
		CHECK_IS(msgsnd(queue, &sent, 5, 0), 0);
		CHECK_IS(msgrcv(queue, at, LIE, 0, IPC_NOWAIT), 5);
		int directory = open(".", O_RDONLY | O_DIRECTORY);
		CHECK(syscall(SYS_getdents64, directory, at, LIE) > 0);
		CHECK_IS(close(directory), 0);
		socklen_t length = LIE;
		CHECK_IS(getsockopt(datagrams[0], SOL_SOCKET, SO_TYPE, at, &length), 0);
		CHECK(length == 4 && *(int *)at == SOCK_DGRAM);
		/* nothing fits */
		CHECK(read(ends[0], constant + PAGE - 4, 0) == 0 && write(ends[1], "x", 1) == 1);
		CHECK(syscall(SYS_read, ends[0], page + PAGE, 1) == -1 && errno == EFAULT);
		CHECK_IS(read(ends[0], rest, sizeof rest), 1);

		/* what is written again, the same, to memory that can only be read */
		CHECK(sendfile(file, empty, (off_t *)constant, 1) == -1 && errno == EFAULT);
		struct timeval none = { 0, 0 };
		CHECK(syscall(SYS_select, 1, constant, NULL, NULL, &none) == -1 && errno == EFAULT);

		/* a datagram is sent whole or not at all, and an error that waits comes before a fault */
		struct iovec lying[2] = { { rest, 1 }, { page + PAGE, 1 } };
		struct msghdr torn = { .msg_iov = lying, .msg_iovlen = 2 };
		CHECK(sendmsg(datagrams[1], &torn, 0) == -1 && errno == EFAULT);
		CHECK(recv(datagrams[0], rest, sizeof rest, 0) == -1 && errno == EAGAIN);
		int streams[2];
		CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, streams) == 0 && write(streams[0], "x", 1) == 1);
		CHECK_IS(close(streams[1]), 0); /* with data that nobody has read */
		CHECK(syscall(SYS_read, streams[0], page + PAGE, 1) == -1 && errno == ECONNRESET);
		CHECK(send(streams[0], page + PAGE, 1, MSG_NOSIGNAL) == -1 && errno == EPIPE);
		CHECK_IS(close(streams[0]), 0);

		/* the kernel refuses its own addresses before it transfers anything, also for no bytes */
		void *kernels = (void *)-PAGE;
		CHECK(syscall(SYS_read, ends[0], kernels, 0) == -1 && errno == EFAULT);
		CHECK(syscall(SYS_write, ends[1], kernels, 0) == -1 && errno == EFAULT);
		CHECK(syscall(SYS_sendto, datagrams[1], kernels, 0, 0, NULL, 0) == -1 && errno == EFAULT);
		CHECK(syscall(SYS_recvfrom, datagrams[0], kernels, 0, 0, NULL, NULL) == -1 && errno == EFAULT);
		struct iovec partly[2] = { { rest, 1 }, { kernels, 0 } };
		CHECK(writev(ends[1], partly, 2) == -1 && errno == EFAULT);
		struct msghdr bad = { .msg_iov = partly, .msg_iovlen = 2 };
		CHECK(sendmsg(datagrams[1], &bad, 0) == -1 && errno == EFAULT);
		CHECK_IS(read(ends[0], rest, sizeof rest), -1);
		CHECK_IS(recv(datagrams[0], rest, sizeof rest, 0), -1);
		CHECK_IS(syscall(SYS_writev, ends[1], kernels, 0), 0);
		CHECK(getgroups(0, kernels) >= 0);
		rest_ms(1);
	} while (going());
	CHECK_IS(msgctl(queue, IPC_RMID, NULL), 0);
	CHECK(unlink("file") == 0 && unlink("empty") == 0);
	leave_scratch();
	return pass();
}
