/* Proves: what Unix sockets carry besides bytes: several descriptors at once, between parent and
 * child, peeked at, truncated, close-on-exec; credentials sent and requested; names in the
 * abstract namespace and in files. */
#include "program.h"
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>

#define MOST 16

/* Sends one byte, these descriptors and, on request, credentials. */
static void send_with(int over, const int *fds, int count, bool credentials)
{
	char byte = 'd';
	union {
		struct cmsghdr align;
		char space[CMSG_SPACE(MOST * sizeof(int)) + CMSG_SPACE(sizeof(struct ucred))];
	} u;
	memset(&u, 0, sizeof u);
	struct iovec data = { &byte, 1 };
	struct msghdr m = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = u.space };
	m.msg_controllen = sizeof u.space;
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	size_t length = 0;
	if (count) {
		c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
		memcpy(CMSG_DATA(c), fds, (size_t)count * sizeof(int));
		length += CMSG_SPACE((size_t)count * sizeof(int));
		c = (void *)(u.space + length);
	}
	if (credentials) {
		struct ucred me = { getpid(), getuid(), getgid() };
		c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_CREDENTIALS, c->cmsg_len = CMSG_LEN(sizeof me);
		memcpy(CMSG_DATA(c), &me, sizeof me);
		length += CMSG_SPACE(sizeof me);
	}
	m.msg_controllen = length;
	if (!length)
		m.msg_control = NULL;
	CHECK_IS(sendmsg(over, &m, 0), 1);
}

struct got {
	int fds[MOST], count, flags;
	struct ucred from;
	bool has_from;
};

static struct got receive(int over, size_t room, int flags)
{
	/* bytes of an earlier call, which must not be in the padding */
	static char ones[4000];
	memset(ones, 0xff, sizeof ones);
	int null = open("/dev/null", O_WRONLY);
	CHECK_IS(write(null, ones, sizeof ones), sizeof ones);
	CHECK_IS(close(null), 0);

	struct got got = { .count = 0 };
	char byte = 0, space[1024] __attribute__((aligned(8))) = { 0 };
	struct iovec data = { &byte, 1 };
	struct msghdr m = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = space, .msg_controllen = room };
	CHECK_IS(recvmsg(over, &m, flags), 1);
	CHECK_IS(byte, 'd');
	got.flags = m.msg_flags;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
		CHECK_IS(c->cmsg_level, SOL_SOCKET);
		for (size_t i = c->cmsg_len; i % sizeof(size_t); i++)
			CHECK_IS(((char *)c)[i], 0); /* the padding is left unchanged */
		if (c->cmsg_type == SCM_RIGHTS) {
			got.count = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
			CHECK(got.count <= MOST);
			memcpy(got.fds, CMSG_DATA(c), (size_t)got.count * sizeof(int));
		} else {
			CHECK_IS(c->cmsg_type, SCM_CREDENTIALS);
			memcpy(&got.from, CMSG_DATA(c), sizeof got.from);
			got.has_from = true;
		}
	}
	return got;
}

static void close_all(const int *fds, int count)
{
	for (int i = 0; i < count; i++)
		CHECK_IS(close(fds[i]), 0);
}

static void rights(void)
{
	int pair[2], ends[2], own[3];
	CHECK_IS(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
	CHECK_IS(pipe(ends), 0);
	own[0] = ends[1], own[1] = open("/dev/null", O_RDONLY), own[2] = pair[1];
	send_with(pair[0], own, 3, false);
	struct got peeked = receive(pair[1], 1024, MSG_PEEK);
	CHECK_IS(peeked.count, 3);
	close_all(peeked.fds, 3);
	struct got got = receive(pair[1], 1024, MSG_CMSG_CLOEXEC);
	CHECK_IS(got.count, 3);
	CHECK_IS(got.flags, MSG_CMSG_CLOEXEC);
	for (int i = 0; i < 3; i++) {
		struct stat a, b;
		CHECK(fstat(own[i], &a) == 0 && fstat(got.fds[i], &b) == 0);
		CHECK(a.st_ino == b.st_ino && a.st_dev == b.st_dev);
		CHECK_IS(fcntl(got.fds[i], F_GETFD), FD_CLOEXEC);
	}
	close_all(got.fds, 3);
	/* room for two of three: the third is closed, and that is reported */
	send_with(pair[0], own, 3, false);
	got = receive(pair[1], CMSG_SPACE(2 * sizeof(int)), 0);
	CHECK_IS(got.count, 2);
	CHECK_IS(got.flags, MSG_CTRUNC);
	CHECK_IS(fcntl(got.fds[0], F_GETFD), 0);
	close_all(got.fds, 2);
	send_with(pair[0], own, 3, false);
	got = receive(pair[1], CMSG_LEN(sizeof(int)), 0); /* not even the padding fits */
	CHECK_IS(got.count, 1);
	CHECK_IS(got.flags, MSG_CTRUNC);
	close_all(got.fds, 1);
	send_with(pair[0], own, 3, false);
	got = receive(pair[1], 0, 0);
	CHECK_IS(got.count, 0);
	CHECK_IS(got.flags, MSG_CTRUNC);
	int bad = 999;
	struct cmsghdr *c;
	char space[CMSG_SPACE(sizeof bad)] __attribute__((aligned(8))), byte = 0;
	memset(space, 0, sizeof space);
	struct iovec data = { &byte, 1 };
	struct msghdr m = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space };
	c = CMSG_FIRSTHDR(&m);
	c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof bad);
	memcpy(CMSG_DATA(c), &bad, sizeof bad);
	CHECK_IS(sendmsg(pair[0], &m, 0), -1);
	CHECK_IS(errno, EBADF);

	/* to a child and back: it writes through this process's descriptor, and this process
	 * gets the child's */
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		close(ends[0]), close(ends[1]), close(pair[0]);
		struct got mine = receive(pair[1], 1024, 0);
		CHECK_IS(mine.count, 1);
		CHECK_IS(write(mine.fds[0], "child", 5), 5);
		close(mine.fds[0]);
		int two[2];
		CHECK_IS(pipe(two), 0);
		CHECK_IS(write(two[1], "from it", 7), 7);
		rest_ms(20);
		send_with(pair[1], two, 2, false);
		_exit(4);
	}
	send_with(pair[0], own, 1, false);
	close(ends[1]);
	char text[16];
	CHECK_IS(read(ends[0], text, 16), 5);
	CHECK(memcmp(text, "child", 5) == 0);
	got = receive(pair[0], 1024, 0);
	CHECK_IS(got.count, 2);
	await_exit(child, 4);
	CHECK_IS(read(got.fds[0], text, 16), 7);
	CHECK_IS(write(got.fds[1], "!", 1), 1);
	CHECK_IS(read(got.fds[0], text, 16), 1);
	close_all(got.fds, 2);
	CHECK_IS(read(ends[0], text, 1), 0);
	close(ends[0]), close(own[1]), close(pair[0]), close(pair[1]);
}

static void credentials(void)
{
	int pair[2], on = 1;
	CHECK_IS(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
	CHECK_IS(setsockopt(pair[1], SOL_SOCKET, SO_PASSCRED, &on, sizeof on), 0);
	/* not sent, but attached nevertheless */
	send_with(pair[0], NULL, 0, false);
	struct got got = receive(pair[1], 1024, 0);
	CHECK(got.has_from);
	CHECK_IS(got.from.pid, getpid());
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		send_with(pair[0], NULL, 0, false);
		send_with(pair[0], (int[]){ 0, 1 }, 2, true);
		_exit(0);
	}
	for (int i = 0; i < 2; i++) {
		got = receive(pair[1], 1024, 0);
		CHECK(got.has_from);
		CHECK_IS(got.from.pid, child);
		CHECK_IS(got.from.uid, getuid());
		CHECK_IS(got.count, i * 2);
		close_all(got.fds, got.count);
	}
	await_exit(child, 0);
	close(pair[0]), close(pair[1]);
}

static void names(void)
{
	struct sockaddr_un name = { .sun_family = AF_UNIX }, told;
	/* the kernel chooses an abstract name: a NUL and five digits */
	int server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	CHECK_IS(bind(server, (void *)&name, sizeof name.sun_family), 0);
	socklen_t length = sizeof told;
	CHECK_IS(getsockname(server, (void *)&told, &length), 0);
	CHECK_IS(length, offsetof(struct sockaddr_un, sun_path) + 6);
	CHECK_IS(told.sun_path[0], 0);
	CHECK_IS(listen(server, 5), 0);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		int client = socket(AF_UNIX, SOCK_STREAM, 0);
		rest_ms(20);
		CHECK_IS(connect(client, (void *)&told, length), 0);
		struct ucred peer;
		socklen_t size = sizeof peer;
		CHECK_IS(getsockopt(client, SOL_SOCKET, SO_PEERCRED, &peer, &size), 0);
		CHECK_IS(peer.pid, getppid());
		CHECK_IS(send(client, "q", 1, 0), 1);
		char byte;
		CHECK_IS(recv(client, &byte, 1, 0), 1);
		_exit(byte);
	}
	struct sockaddr_un from;
	socklen_t from_length = sizeof from;
	int peer = accept4(server, (void *)&from, &from_length, SOCK_CLOEXEC);
	CHECK(peer >= 0);
	CHECK_IS(from_length, sizeof from.sun_family); /* it has no name */
	CHECK_IS(fcntl(peer, F_GETFD), FD_CLOEXEC);
	struct ucred other;
	socklen_t size = sizeof other;
	CHECK_IS(getsockopt(peer, SOL_SOCKET, SO_PEERCRED, &other, &size), 0);
	CHECK_IS(other.pid, child);
	CHECK_IS(send(peer, "A", 1, 0), 1);
	await_exit(child, 'A');
	close(peer), close(server);

	/* datagrams between names in a folder; one too long is truncated, and MSG_TRUNC returns
	 * its real length */
	int a = socket(AF_UNIX, SOCK_DGRAM, 0), b = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0);
	strcpy(name.sun_path, "a");
	CHECK_IS(bind(a, (void *)&name, sizeof name), 0);
	CHECK_IS(bind(b, (void *)&name, sizeof name), -1);
	CHECK_IS(errno, EADDRINUSE);
	strcpy(name.sun_path, "b-name");
	CHECK_IS(bind(a, (void *)&name, sizeof name), -1);
	CHECK_IS(errno, EINVAL);
	CHECK_IS(bind(b, (void *)&name, offsetof(struct sockaddr_un, sun_path) + 7), 0);
	strcpy(name.sun_path, "a");
	CHECK_IS(sendto(b, "a long one", 10, 0, (void *)&name, sizeof name), 10);
	CHECK_IS(sendto(b, NULL, 0, 0, (void *)&name, sizeof name), 0);
	char text[8];
	from_length = sizeof from;
	CHECK_IS(recvfrom(a, text, 4, MSG_TRUNC | MSG_PEEK, (void *)&from, &from_length), 10);
	CHECK(strcmp(from.sun_path, "b-name") == 0);
	CHECK_IS(from_length, offsetof(struct sockaddr_un, sun_path) + 7);
	from_length = 4; /* the name is truncated, its length is not */
	CHECK_IS(recvfrom(a, text, 4, 0, (void *)&from, &from_length), 4);
	CHECK_IS(from_length, offsetof(struct sockaddr_un, sun_path) + 7);
	CHECK_IS(recv(a, text, 4, 0), 0);
	CHECK_IS(recv(b, text, 4, 0), -1);
	CHECK_IS(errno, EAGAIN);
	CHECK_IS(recv(a, text, 4, MSG_DONTWAIT), -1);
	CHECK_IS(errno, EAGAIN);
	close(a);
	CHECK_IS(sendto(b, "x", 1, 0, (void *)&name, sizeof name), -1);
	CHECK_IS(errno, ECONNREFUSED);
	close(b);
	CHECK_IS(unlink("a") | unlink("b-name"), 0);
}

/* Several messages with one call; their boundaries are kept. */
static void many(void)
{
	int pair[2];
	CHECK_IS(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
	struct mmsghdr out[4], in[6];
	struct iovec parts[4][2], rooms[6];
	char texts[4][8] = { "one", "two", "three", "four" }, got[6][8];
	memset(out, 0, sizeof out), memset(in, 0, sizeof in), memset(got, 0, sizeof got);
	for (int i = 0; i < 4; i++) {
		parts[i][0] = (struct iovec){ texts[i], 2 };
		parts[i][1] = (struct iovec){ texts[i] + 2, strlen(texts[i]) - 2 };
		out[i].msg_hdr.msg_iov = parts[i], out[i].msg_hdr.msg_iovlen = 2;
	}
	for (int i = 0; i < 6; i++) {
		rooms[i] = (struct iovec){ got[i], 4 };
		in[i].msg_hdr.msg_iov = &rooms[i], in[i].msg_hdr.msg_iovlen = 1;
	}
	CHECK_IS(sendmmsg(pair[0], out, 4, 0), 4);
	CHECK_IS(out[2].msg_len, 5);
	CHECK_IS(recvmmsg(pair[1], in, 6, MSG_DONTWAIT, NULL), 4);
	for (int i = 0; i < 4; i++) {
		CHECK(strncmp(got[i], texts[i], 4) == 0);
		CHECK_IS(in[i].msg_len, strlen(texts[i]) < 4 ? 3 : 4);
		CHECK_IS(in[i].msg_hdr.msg_flags & MSG_TRUNC, i == 2 ? MSG_TRUNC : 0);
	}
	/* waits for one and takes those available; with a child that sends slowly, waits for all */
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		for (int i = 0; i < 3; i++) {
			rest_ms(20);
			CHECK_IS(send(pair[0], "slow", 4, 0), 4);
		}
		_exit(0);
	}
	CHECK_IS(recvmmsg(pair[1], in, 1, MSG_WAITFORONE, NULL), 1);
	CHECK_IS(recvmmsg(pair[1], in, 2, 0, NULL), 2);
	CHECK(memcmp(got[1], "slow", 4) == 0);
	await_exit(child, 0);
	struct timespec limit = { 0, 0 };
	CHECK_IS(send(pair[0], "end", 3, 0), 3);
	CHECK_IS(recvmmsg(pair[1], in, 3, 0, &limit), 1); /* the timeout is checked after each message */
	CHECK_IS(shutdown(pair[0], SHUT_WR), 0);
	CHECK_IS(recv(pair[1], got[0], 4, 0), 0);
	close(pair[0]), close(pair[1]);
}

int main(void)
{
	enter_scratch();
	do {
		rights();
		credentials();
		names();
		many();
	} while (going());
	leave_scratch();
	return pass();
}
