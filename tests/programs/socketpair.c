/* Proves: a pair of Unix sockets: descriptors passed over it (SCM_RIGHTS), peer credentials,
 * MSG_WAITALL over several writes of a child, shutdown. */
#include "program.h"
#include <sys/socket.h>

static void send_fd(int over, int fd)
{
	char byte = 'f', space[CMSG_SPACE(sizeof fd)];
	memset(space, 0, sizeof space);
	struct iovec data = { &byte, 1 };
	struct msghdr m = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space };
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof fd);
	memcpy(CMSG_DATA(c), &fd, sizeof fd);
	CHECK_IS(sendmsg(over, &m, 0), 1);
}

static int receive_fd(int over)
{
	char byte = 0, space[CMSG_SPACE(sizeof(int))];
	struct iovec data = { &byte, 1 };
	struct msghdr m = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space };
	CHECK_IS(recvmsg(over, &m, MSG_CMSG_CLOEXEC), 1);
	CHECK_IS(byte, 'f');
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	CHECK(c && c->cmsg_type == SCM_RIGHTS && c->cmsg_len == CMSG_LEN(sizeof(int)));
	int fd;
	memcpy(&fd, CMSG_DATA(c), sizeof fd);
	return fd;
}

int main(void)
{
	static char block[40000];
	do {
		int pair[2], ends[2];
		CHECK_IS(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
		CHECK_IS(pipe(ends), 0);
		send_fd(pair[0], ends[1]);
		int passed = receive_fd(pair[1]);
		CHECK(passed > ends[1]);
		CHECK_IS(fcntl(passed, F_GETFD), FD_CLOEXEC);
		CHECK_IS(close(ends[1]), 0);
		CHECK_IS(write(passed, "through", 7), 7);
		char text[16];
		CHECK_IS(read(ends[0], text, sizeof text), 7);
		CHECK(memcmp(text, "through", 7) == 0);
		CHECK_IS(close(passed), 0);
		CHECK_IS(read(ends[0], text, 1), 0);
		close(ends[0]);

		struct ucred peer;
		socklen_t length = sizeof peer;
		CHECK_IS(getsockopt(pair[0], SOL_SOCKET, SO_PEERCRED, &peer, &length), 0);
		CHECK_IS(peer.pid, getpid());

		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			for (int part = 0; part < 4; part++) {
				memset(block, 'a' + part, 10000);
				CHECK_IS(send(pair[1], block, 10000, 0), 10000);
				rest_ms(20);
			}
			_exit(0);
		}
		CHECK_IS(recv(pair[0], block, sizeof block, MSG_WAITALL), sizeof block);
		for (int part = 0; part < 4; part++)
			CHECK(block[part * 10000] == 'a' + part && block[part * 10000 + 9999] == 'a' + part);
		await_exit(child, 0);
		CHECK_IS(shutdown(pair[1], SHUT_WR), 0);
		CHECK_IS(recv(pair[0], block, 1, 0), 0);
		CHECK_IS(send(pair[1], "x", 1, MSG_NOSIGNAL), -1);
		CHECK_IS(errno, EPIPE);
		close(pair[0]), close(pair[1]);
	} while (going());
	return pass();
}
