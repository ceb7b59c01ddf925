/* Tries: raw calls, made away, to affect the node that it runs on: the result of each must be
 * home's. */
#include "hostile.h"
#include <arpa/inet.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/utsname.h>

static void show_file(const char *what, const char *path)
{
	char text[4096];
	long fd = syscall(SYS_open, path, O_RDONLY);
	ssize_t n = fd < 0 ? -1 : syscall(SYS_read, fd, text, sizeof text - 1);
	text[n < 0 ? 0 : n] = 0;
	char *end = strchr(text, '\n');
	if (end)
		*end = 0;
	say("%s: %s\n", what, text);
	syscall(SYS_close, fd);
}

static void refused(const char *what, long ret, int wanted)
{
	if (ret != -1 || errno != wanted)
		fail("FAIL: %s gave %ld, errno %d\n", what, ret, errno);
}

int main(void)
{
	struct utsname names;
	char link[256] = { 0 }, params[256] = { 0 };
	CHECK(mkdir("/tmp/hostile-mount", 0700) == 0 || errno == EEXIST);
	ready();
	CHECK_IS(syscall(SYS_uname, &names), 0);
	say("uname: %s\n", names.nodename);
	show_file("hostname", "/proc/sys/kernel/hostname");
	show_file("only at home", "/tmp/only-at-home");
	CHECK(syscall(SYS_readlink, "/proc/self/ns/net", link, sizeof link - 1) > 0);
	say("net: %s\n", link);
	CHECK(syscall(SYS_readlink, "/proc/self/ns/user", link, sizeof link - 1) > 0);
	say("user: %s\n", link);

	long sock = syscall(SYS_socket, AF_INET, SOCK_STREAM, 0);
	CHECK(sock >= 0);
	struct sockaddr_in own = { .sin_family = AF_INET, .sin_port = htons(4711) };
	CHECK_IS(syscall(SYS_bind, sock, &own, sizeof own), 0);
	CHECK_IS(syscall(SYS_listen, sock, 5), 0);
	CHECK(syscall(SYS_memfd_create, "hostile", 0) >= 0);
	CHECK_IS(syscall(SYS_mount, "none", "/tmp/hostile-mount", "tmpfs", 0, NULL), 0);

	/* The first process of a namespace cannot be killed from inside; in the guest's own
	 * namespace it would be its helper. */
	CHECK_IS(syscall(SYS_kill, 1, SIGKILL), 0);
	CHECK_IS(syscall(SYS_tkill, 1, SIGKILL), 0);
	refused("kill of nobody", syscall(SYS_kill, 4000000, SIGKILL), ESRCH);

	refused("io_uring_setup", syscall(SYS_io_uring_setup, 4, params), ENOSYS);
	refused("userfaultfd", syscall(SYS_userfaultfd, 0), ENOSYS);
	refused("an x32 getpid", syscall(0x40000000 | 39), ENOSYS);
	refused("call 9999", syscall(9999), ENOSYS);
	refused("call -1", syscall(-1), ENOSYS);
	done();
	CHECK_IS(umount("/tmp/hostile-mount"), 0);
	CHECK_IS(rmdir("/tmp/hostile-mount"), 0);
	return pass();
}
