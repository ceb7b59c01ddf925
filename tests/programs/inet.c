/* Proves: TCP and UDP over loopback, IPv4 and IPv6: options, a non-blocking connect, urgent data,
 * linger, timeouts of sockets, peeking, waiting for all, half-closed connections, error queues of a
 * refused datagram. */
#include "program.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/time.h>

static struct sockaddr_in at;

static int bound(int type)
{
	int fd = socket(AF_INET, type, 0);
	CHECK(fd >= 0);
	at = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	CHECK_IS(bind(fd, (void *)&at, sizeof at), 0);
	socklen_t length = sizeof at;
	CHECK_IS(getsockname(fd, (void *)&at, &length), 0);
	CHECK(length == sizeof at && at.sin_port != 0);
	return fd;
}

static int option(int fd, int level, int name)
{
	int value = -1;
	socklen_t length = sizeof value;
	CHECK_IS(getsockopt(fd, level, name, &value, &length), 0);
	CHECK_IS(length, sizeof value);
	return value;
}

static void options(int fd)
{
	int one = 1, size = 8192;
	CHECK_IS(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one), 0);
	CHECK_IS(option(fd, SOL_SOCKET, SO_REUSEADDR), 1);
	CHECK_IS(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size), 0);
	CHECK_IS(option(fd, SOL_SOCKET, SO_SNDBUF), 2 * 8192);
	CHECK_IS(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one), 0);
	CHECK_IS(option(fd, IPPROTO_TCP, TCP_NODELAY), 1);
	CHECK_IS(option(fd, SOL_SOCKET, SO_TYPE), SOCK_STREAM);
	CHECK_IS(option(fd, SOL_SOCKET, SO_DOMAIN), AF_INET);
	CHECK_IS(option(fd, SOL_SOCKET, SO_ACCEPTCONN), 0);
	struct linger linger = { 1, 3 }, told;
	socklen_t length = sizeof told;
	CHECK_IS(setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger), 0);
	CHECK_IS(getsockopt(fd, SOL_SOCKET, SO_LINGER, &told, &length), 0);
	CHECK(told.l_onoff == 1 && told.l_linger == 3);
	linger.l_onoff = 0;
	CHECK_IS(setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger), 0);
	struct tcp_info info;
	length = sizeof info;
	CHECK_IS(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length), 0);
	CHECK_IS(info.tcpi_state, TCP_CLOSE);
	length = 2; /* less room than the value needs */
	short narrow = -1;
	CHECK_IS(getsockopt(fd, SOL_SOCKET, SO_TYPE, &narrow, &length), 0);
	CHECK(length == 2 && narrow == SOCK_STREAM);
	CHECK_IS(setsockopt(fd, SOL_SOCKET, 9999, &one, sizeof one), -1);
	CHECK_IS(errno, ENOPROTOOPT);
}

static void tcp(void)
{
	int server = bound(SOCK_STREAM);
	CHECK_IS(listen(server, 4), 0);
	CHECK_IS(option(server, SOL_SOCKET, SO_ACCEPTCONN), 1);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		close(server);
		int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
		options(fd);
		if (connect(fd, (void *)&at, sizeof at) != 0) {
			CHECK_IS(errno, EINPROGRESS);
			struct pollfd p = { fd, POLLOUT, 0 };
			CHECK_IS(poll(&p, 1, -1), 1);
		}
		CHECK_IS(option(fd, SOL_SOCKET, SO_ERROR), 0);
		CHECK_IS(fcntl(fd, F_SETFL, 0), 0);
		for (int i = 0; i < 5; i++) {
			CHECK_IS(send(fd, "0123456789", 10, i < 4 ? MSG_MORE : 0), 10);
			rest_ms(10);
		}
		CHECK_IS(send(fd, "!", 1, MSG_OOB), 1);
		CHECK_IS(send(fd, "behind", 6, 0), 6);
		CHECK_IS(shutdown(fd, SHUT_WR), 0);
		char answer[8];
		CHECK_IS(recv(fd, answer, 8, MSG_WAITALL), 6); /* until the end of the stream */
		CHECK(memcmp(answer, "answer", 6) == 0);
		_exit(11);
	}
	struct sockaddr_in from;
	socklen_t length = sizeof from;
	int fd = accept(server, (void *)&from, &length);
	CHECK(fd >= 0);
	CHECK(length == sizeof from && from.sin_addr.s_addr == htonl(INADDR_LOOPBACK));
	char text[64];
	CHECK_IS(recv(fd, text, 50, MSG_WAITALL | MSG_PEEK), 50);
	CHECK_IS(recv(fd, text, 50, MSG_WAITALL), 50);
	CHECK(memcmp(text + 40, "0123456789", 10) == 0);
	struct pollfd p = { fd, POLLPRI, 0 };
	CHECK_IS(poll(&p, 1, -1), 1);
	CHECK_IS(recv(fd, text, 1, MSG_OOB), 1);
	CHECK_IS(text[0], '!');
	int mark;
	CHECK_IS(ioctl(fd, SIOCATMARK, &mark), 0);
	CHECK_IS(mark, 1);
	CHECK_IS(recv(fd, text, 64, MSG_WAITALL), 6);
	CHECK(memcmp(text, "behind", 6) == 0);
	CHECK_IS(recv(fd, text, 1, 0), 0);
	p.events = POLLIN | POLLRDHUP;
	CHECK_IS(poll(&p, 1, 0), 1);
	CHECK_IS(p.revents, POLLIN | POLLRDHUP);
	CHECK_IS(send(fd, "answer", 6, 0), 6);
	close(fd);
	await_exit(child, 11);
	/* no listener any more */
	close(server);
	fd = socket(AF_INET, SOCK_STREAM, 0);
	CHECK_IS(connect(fd, (void *)&at, sizeof at), -1);
	CHECK_IS(errno, ECONNREFUSED);
	close(fd);
}

/* Socket timeouts, a reset by linger, and a file sent. */
static void finer(void)
{
	int server = bound(SOCK_STREAM), pair[2];
	CHECK_IS(listen(server, 1), 0);
	struct timeval limit = { 0, 60000 };
	CHECK_IS(setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), 0);
	double begun = now();
	CHECK_IS(accept(server, NULL, NULL), -1);
	CHECK_IS(errno, EAGAIN);
	CHECK(now() - begun > 0.049); /* counted in ticks, the first of which may be almost over */
	pair[0] = socket(AF_INET, SOCK_STREAM, 0);
	CHECK_IS(connect(pair[0], (void *)&at, sizeof at), 0);
	pair[1] = accept(server, NULL, NULL);
	CHECK(pair[1] >= 0);
	CHECK_IS(setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), 0);
	char text[600];
	begun = now();
	CHECK_IS(recv(pair[0], text, 4, 0), -1);
	CHECK_IS(errno, EAGAIN);
	CHECK(now() - begun > 0.049); /* counted in ticks, the first of which may be almost over */
	/* a full socket fails after its timeout */
	static char block[1 << 20];
	CHECK_IS(setsockopt(pair[0], SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit), 0);
	ssize_t n, sent = 0, received = 0;
	while ((n = send(pair[0], block, sizeof block, 0)) > 0)
		sent += n;
	CHECK_IS(errno, EAGAIN);
	while (received < sent) {
		CHECK((n = recv(pair[1], block, sizeof block, 0)) > 0);
		received += n;
	}
	/* a file, from its middle */
	int file = open("/proc/self/exe", O_RDONLY);
	off_t from = 100;
	CHECK_IS(sendfile(pair[0], file, &from, 500), 500);
	CHECK_IS(from, 600);
	CHECK_IS(lseek(file, 0, SEEK_CUR), 0);
	CHECK_IS(recv(pair[1], text, 500, MSG_WAITALL), 500);
	char same[500];
	CHECK_IS(pread(file, same, 500, 100), 500);
	CHECK(memcmp(text, same, 500) == 0);
	close(file);
	struct linger at_once = { 1, 0 };
	CHECK_IS(setsockopt(pair[0], SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once), 0);
	close(pair[0]);
	CHECK_IS(recv(pair[1], text, 1, 0), -1);
	CHECK_IS(errno, ECONNRESET);
	close(pair[1]), close(server);
}

static void udp(void)
{
	int one = 1, server = bound(SOCK_DGRAM), client = socket(AF_INET, SOCK_DGRAM, 0);
	CHECK_IS(setsockopt(server, IPPROTO_IP, IP_PKTINFO, &one, sizeof one), 0);
	CHECK_IS(connect(client, (void *)&at, sizeof at), 0);
	CHECK_IS(send(client, "datagram", 8, 0), 8);
	CHECK_IS(send(client, "", 0, 0), 0);
	char text[16], space[256] __attribute__((aligned(8)));
	struct sockaddr_in from, own;
	struct iovec data[2] = { { text, 3 }, { text + 3, 3 } };
	struct msghdr m = { .msg_name = &from, .msg_namelen = sizeof from, .msg_iov = data, .msg_iovlen = 2,
			    .msg_control = space, .msg_controllen = sizeof space };
	CHECK_IS(recvmsg(server, &m, 0), 6);
	CHECK(memcmp(text, "datagr", 6) == 0);
	CHECK_IS(m.msg_flags, MSG_TRUNC);
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	CHECK(c && c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_PKTINFO);
	struct in_pktinfo info;
	memcpy(&info, CMSG_DATA(c), sizeof info);
	CHECK_IS(info.ipi_addr.s_addr, htonl(INADDR_LOOPBACK));
	socklen_t length = sizeof own;
	CHECK_IS(getsockname(client, (void *)&own, &length), 0);
	CHECK_IS(m.msg_namelen, sizeof from);
	CHECK_IS(own.sin_port, from.sin_port);
	CHECK_IS(recv(server, text, 16, 0), 0);
	/* disconnected by AF_UNSPEC; then the error of a datagram without a receiver is reported by
	 * the next call */
	struct sockaddr none = { .sa_family = AF_UNSPEC };
	CHECK_IS(connect(client, &none, sizeof none), 0);
	CHECK_IS(send(client, "x", 1, 0), -1);
	CHECK_IS(errno, EDESTADDRREQ);
	CHECK_IS(connect(client, (void *)&at, sizeof at), 0);
	CHECK_IS(setsockopt(client, IPPROTO_IP, IP_RECVERR, &one, sizeof one), 0);
	close(server);
	CHECK_IS(send(client, "y", 1, 0), 1);
	CHECK_IS(recv(client, text, 16, 0), -1);
	CHECK_IS(errno, ECONNREFUSED);
	data[0].iov_len = 1;
	m.msg_namelen = sizeof from, m.msg_iovlen = 1, m.msg_controllen = sizeof space;
	CHECK_IS(recvmsg(client, &m, MSG_ERRQUEUE), 1);
	CHECK_IS(m.msg_flags & MSG_ERRQUEUE, MSG_ERRQUEUE);
	CHECK_IS(text[0], 'y');
	close(client);

	/* the same calls with the other address family, if it exists */
	int six = socket(AF_INET6, SOCK_DGRAM, 0);
	if (six < 0)
		return;
	struct sockaddr_in6 at6 = { .sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT }, from6;
	if (bind(six, (void *)&at6, sizeof at6) == 0) {
		length = sizeof at6;
		CHECK_IS(getsockname(six, (void *)&at6, &length), 0);
		CHECK_IS(length, sizeof at6);
		CHECK_IS(sendto(six, "six", 3, 0, (void *)&at6, sizeof at6), 3);
		CHECK_IS(recvfrom(six, text, 16, 0, (void *)&from6, &length), 3);
		CHECK_IS(from6.sin6_port, at6.sin6_port);
	}
	close(six);
}

int main(void)
{
	do {
		tcp();
		finer();
		udp();
	} while (going());
	return pass();
}
