/* pingpong PORT | pingpong ADDRESS PORT SECONDS: 64 bytes back and forth over TCP, without
 * delay. */
#include "stopwatch.h"
#include <arpa/inet.h>
#include <netinet/tcp.h>

static void must(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

static void take(int fd, char *bytes, size_t length)
{
	for (size_t done = 0; done < length;) {
		ssize_t count = read(fd, bytes + done, length - done);
		if (count == 0)
			exit(0);
		must(count > 0, "read");
		done += (size_t)count;
	}
}

static void once(int fd)
{
	char bytes[64] = { 1 };
	must(write(fd, bytes, sizeof bytes) == sizeof bytes, "write");
	take(fd, bytes, sizeof bytes);
}

int main(int argc, char **argv)
{
	int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
	must(argc == 2 || argc == 4, "pingpong PORT | ADDRESS PORT SECONDS");
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[argc == 2 ? 1 : 2])) };
	if (argc == 2) {
		setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
		must(bind(fd, (struct sockaddr *)&at, sizeof at) == 0, "bind");
		must(listen(fd, 1) == 0, "listen");
		say_pid();
		fd = accept(fd, NULL, NULL);
		must(fd >= 0, "accept");
	} else {
		must(inet_pton(AF_INET, argv[1], &at.sin_addr) == 1, "address");
		must(connect(fd, (struct sockaddr *)&at, sizeof at) == 0, "connect");
		say_pid();
	}
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	if (argc == 4) {
		batches(atof(argv[3]), once, fd);
		return 0;
	}
	for (char bytes[64];;) {
		take(fd, bytes, sizeof bytes);
		must(write(fd, bytes, sizeof bytes) == sizeof bytes, "write");
	}
}
