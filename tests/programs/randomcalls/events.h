/* Pipes, sockets, and descriptors that report events. */
#ifndef RANDOMCALLS_EVENTS_H
#define RANDOMCALLS_EVENTS_H

#include "names.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/select.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/un.h>

static void op_pipe(void)
{
	int ends[2] = { -1, -1 };
	long flags = O_NONBLOCK | SOME(4, O_CLOEXEC), result;
	if (one_in(2)) {
		bool bad = one_in(15);
		result = CALL(pipe2, bad ? (int *)(buffers + buffers_size) : ends, flags);
		note("pipe2(%lo) = %s %d %d", flags, shown(result), ends[0], ends[1]);
		if (result == 0)
			opened(ends[0], PIPE_IN), opened(ends[1], PIPE_OUT);
	} else {
		long type = PICK(SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET) | SOCK_NONBLOCK | SOME(4, SOCK_CLOEXEC);
		result = CALL(socketpair, one_in(15) ? AF_INET : AF_UNIX, type, PICK(0, 0, 0, 9), ends);
		/* The kernel writes the numbers also if it fails. */
		note("socketpair(%lx) = %s %d %d", type, shown(result), result ? 0 : ends[0], result ? 0 : ends[1]);
		if (result == 0)
			opened(ends[0], SOCKET), opened(ends[1], SOCKET);
	}
}

/* A message, sometimes with descriptors or the sender's name. */
static void op_send(void)
{
	int fd = some_fd(OF(SOCKET)), passed = some_fd(~OF(CLOSED) & ~OF(PROCESS) & ~OF(SOCKET) & ~OF(EPOLL));
	size_t length = some_length() % 3000;
	struct place place = some_place(length, false);
	long flags = MSG_DONTWAIT | MSG_NOSIGNAL | SOME(8, MSG_EOR, MSG_MORE), result;
	if (place.good)
		random_data(place.at, length);
	if (one_in(2)) {
		result = CALL(sendto, fd, place.at, length, flags, NULL, 0);
		note("sendto(%d %s %zu %lx) = %s", fd, place.what, length, flags, shown_if(place.good, result));
		return;
	}
	union {
		char room[CMSG_SPACE(2 * sizeof(int))];
		struct cmsghdr align;
	} control = { { 0 } };
	struct iovec parts[2] = { { place.at, length / 2 }, { place.at + length / 2, length - length / 2 } };
	struct msghdr message = { .msg_iov = parts, .msg_iovlen = place.good ? 2 : 1 };
	int count = (int)draw(3);
	if (count) {
		message.msg_control = control.room;
		message.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
		struct cmsghdr *head = CMSG_FIRSTHDR(&message);
		*head = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN((size_t)count * sizeof(int)) };
		for (int i = 0; i < count; i++)
			memcpy(CMSG_DATA(head) + i * sizeof(int), &passed, sizeof passed);
	}
	result = CALL(sendmsg, fd, &message, flags);
	note("sendmsg(%d %s %zu %lx, %d of %d) = %s", fd, place.what, length, flags, count, passed, shown_if(place.good, result));
}

static void op_receive(void)
{
	static char data[4096];
	int fd = some_fd(OF(SOCKET));
	size_t length = (size_t)PICK(0, 1, 10, 100, 4000);
	long flags = MSG_DONTWAIT | SOME(6, MSG_PEEK, MSG_TRUNC, MSG_CMSG_CLOEXEC, MSG_OOB), result;
	memset(data, 0xa5, sizeof data);
	if (one_in(3)) {
		result = CALL(recvfrom, fd, data, length, flags, NULL, NULL);
		note("recvfrom(%d %zu %lx) = %s %08x", fd, length, flags, shown(result), digest(data, sizeof data));
		return;
	}
	union {
		char room[CMSG_SPACE(4 * sizeof(int)) + CMSG_SPACE(sizeof(struct ucred))];
		struct cmsghdr align;
	} control = { { 0 } };
	struct iovec parts[2] = { { data, length / 3 }, { data + length / 3, length - length / 3 } };
	struct msghdr message = { .msg_iov = parts, .msg_iovlen = 2, .msg_control = control.room,
				  .msg_controllen = (size_t)PICK(0, sizeof control, sizeof control, CMSG_LEN(sizeof(int)), 5) };
	result = CALL(recvmsg, fd, &message, flags);
	note("recvmsg(%d %zu %lx) = %s %08x flags %x control %zu", fd, length, flags, shown(result), digest(data, sizeof data), message.msg_flags,
	     (size_t)message.msg_controllen);
	if (result < 0)
		return;
	for (struct cmsghdr *head = CMSG_FIRSTHDR(&message); head; head = CMSG_NXTHDR(&message, head)) {
		if (head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS)
			for (size_t i = 0; CMSG_LEN((i + 1) * sizeof(int)) <= head->cmsg_len; i++) {
				int got;
				memcpy(&got, CMSG_DATA(head) + i * sizeof got, sizeof got);
				note("  received %d with flags %s", got, shown(CALL(fcntl, got, F_GETFD)));
				/* What it is follows from the file. */
				struct stat s;
				if (fstat(got, &s) == 0 && S_ISREG(s.st_mode) && (fcntl(got, F_GETFL) & O_PATH) == 0)
					opened(got, FILES);
				else
					close(got);
			}
		else
			note("  control %d %d", head->cmsg_level, head->cmsg_type);
	}
}

static void op_socket(void)
{
	int fd = some_fd(OF(SOCKET));
	int value = 0, option = (int)PICK(SO_TYPE, SO_ERROR, SO_PASSCRED, SO_ACCEPTCONN, SO_DOMAIN, SO_PEERCRED, 9999);
	socklen_t size = (socklen_t)PICK(4, 4, 4, 0, 1, -1);
	long how = PICK(SHUT_RD, SHUT_WR, 7), result;
	struct sockaddr_un name;
	socklen_t length = sizeof name;
	switch (draw(4)) {
	case 0:
		result = CALL(getsockopt, fd, SOL_SOCKET, option, &value, &size);
		note("getsockopt(%d %d) = %s %d length %u", fd, option, shown(result), option == SO_PEERCRED ? 0 : value, size);
		break;
	case 1:
		value = (int)draw(2);
		note("setsockopt(%d %d) = %s", fd, value, shown(CALL(setsockopt, fd, SOL_SOCKET, SO_PASSCRED, &value, PICK(4, 4, 1))));
		break;
	case 2:
		if (one_in(3))
			note("shutdown(%d %ld) = %s", fd, how, shown(CALL(shutdown, fd, how)));
		break;
	default:
		result = CALL(getsockname, fd, &name, &length);
		note("getsockname(%d) = %s %u", fd, shown(result), length);
	}
}

static void op_event(void)
{
	uint64_t value = (uint64_t)PICK(0, 1, 2, 1000, -1, -2);
	long result, flags;
	switch (draw(5)) {
	case 0:
		flags = EFD_NONBLOCK | SOME(3, EFD_CLOEXEC, EFD_SEMAPHORE) | (one_in(20) ? 2 : 0);
		result = CALL(eventfd2, draw(5), flags);
		opened(result, EVENT);
		note("eventfd(%lx) = %s", flags, shown(result));
		break;
	case 1: {
		int fd = some_fd(OF(EVENT));
		note("event write(%d %lld) = %s", fd, (long long)value, shown(CALL(write, fd, &value, PICK(8, 8, 8, 4))));
		break;
	}
	case 2: {
		int fd = some_fd(OF(EVENT));
		result = CALL(read, fd, &value, PICK(8, 8, 8, 4));
		note("event read(%d) = %s %lld", fd, shown(result), result == 8 ? (long long)value : 0);
		break;
	}
	case 3:
		flags = (one_in(20) ? 64 : 0) | SOME(3, MFD_CLOEXEC, MFD_ALLOW_SEALING);
		result = CALL(memfd_create, one_in(20) ? NULL : "memory", flags);
		opened(result, MEMORY);
		note("memfd_create(%lx) = %s", flags, shown(result));
		break;
	default: {
		int fd = some_fd(OF(MEMORY));
		long seals = SOME(4, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE);
		note("seal(%d %lx) = %s", fd, seals, shown(CALL(fcntl, fd, F_ADD_SEALS, seals)));
	}
	}
}

/* Timers end at once or not at all, so that no result depends on time. */
static void op_timerfd(void)
{
	int fd = some_fd(OF(TIMER));
	long clock = PICK(CLOCK_MONOTONIC, CLOCK_REALTIME, CLOCK_BOOTTIME, 99), result;
	struct itimerspec set = { .it_value = { PICK(0, 1000, 5000), 0 } }, old = { .it_value = { 0, 0 } };
	uint64_t count = 0;
	if (one_in(4) || fd < 0) {
		result = CALL(timerfd_create, clock, TFD_NONBLOCK | SOME(3, TFD_CLOEXEC));
		opened(result, TIMER);
		note("timerfd_create(%ld) = %s", clock, shown(result));
		return;
	}
	switch (draw(4)) {
	case 0:
		if (one_in(8))
			set.it_value.tv_nsec = 1000000000;
		result = CALL(timerfd_settime, fd, 0, &set, &old);
		note("timerfd_settime(%d %ld) = %s old %ld", fd, (long)set.it_value.tv_sec, shown(result), ((long)old.it_value.tv_sec + 500) / 1000);
		break;
	case 1:
		result = CALL(timerfd_gettime, fd, &old);
		note("timerfd_gettime(%d) = %s %ld", fd, shown(result), ((long)old.it_value.tv_sec + 500) / 1000);
		break;
	case 2:
		result = CALL(read, fd, &count, sizeof count);
		note("timerfd read(%d) = %s %lu", fd, shown(result), (unsigned long)count);
		break;
	default: {
		struct pollfd wait = { fd, POLLIN, 0 };
		set.it_value = (struct timespec){ 0, 1 + (long)draw(3000000) };
		result = CALL(timerfd_settime, fd, 0, &set, NULL);
		if (result == 0 && me.kinds[fd] == TIMER) {
			while ((result = CALL(poll, &wait, 1, -1)) < 0 && errno == EINTR)
				;
			note("  poll = %s %x", shown(result), wait.revents);
			result = CALL(read, fd, &count, sizeof count);
		}
		note("timerfd expires(%d) = %s %lu", fd, shown(result), (unsigned long)count);
	}
	}
}

static int by_fd(const void *a, const void *b)
{
	const struct epoll_event *one = a, *two = b;
	return (one->data.fd > two->data.fd) - (one->data.fd < two->data.fd);
}

static void op_epoll(void)
{
	int set = some_fd(OF(EPOLL)), fd = some_fd(~OF(CLOSED) & ~OF(SIGNALS));
	struct epoll_event events[MAX_FD] = { { .events = (uint32_t)SOME(2, EPOLLIN, EPOLLOUT, EPOLLET, EPOLLONESHOT, EPOLLRDHUP), .data.fd = fd } };
	long result, command = PICK(EPOLL_CTL_ADD, EPOLL_CTL_ADD, EPOLL_CTL_MOD, EPOLL_CTL_DEL, 9), timeout = PICK(0, 0, 1);
	uint32_t wanted = events[0].events;
	switch (set < 0 ? 0 : draw(6)) {
	case 0:
		result = CALL(epoll_create1, PICK(0, EPOLL_CLOEXEC, 0, 8));
		opened(result, EPOLL);
		note("epoll_create1 = %s", shown(result));
		break;
	case 1:
	case 2:
	case 3:
		result = CALL(epoll_ctl, set, command, fd, one_in(20) ? NULL : events);
		note("epoll_ctl(%d %ld %d %x) = %s", set, command, fd, wanted, shown(result));
		break;
	default:
		result = CALL(epoll_pwait, set, events, PICK(MAX_FD, MAX_FD, 1, 0), timeout, NULL, 8);
		/* Which one comes first is an affair of the kernel; only the set is compared. */
		note("epoll_wait(%d) = %s", set, shown(result));
		if (result > 1)
			qsort(events, (size_t)result, sizeof *events, by_fd);
		for (long i = 0; i < result; i++)
			note("  %d %x", events[i].data.fd, events[i].events);
	}
}

static void op_poll(void)
{
	struct pollfd fds[4];
	char text[200] = "";
	unsigned count = 1 + (unsigned)draw(4);
	for (unsigned i = 0; i < count; i++)
		fds[i] = (struct pollfd){ some_fd(~OF(CLOSED) & ~OF(SIGNALS)), (short)SOME(2, POLLIN, POLLOUT, POLLPRI, POLLRDHUP), 0x7777 };
	long result, timeout = PICK(0, 0, 1);
	struct timespec limit = { 0, timeout * 1000000 };
	if (one_in(3)) {
		fd_set in, out;
		FD_ZERO(&in);
		FD_ZERO(&out);
		for (unsigned i = 0; i < count; i++)
			if (fds[i].fd >= 0 && fds[i].fd < MAX_FD)
				FD_SET(fds[i].fd, i % 2 ? &out : &in);
		result = CALL(pselect6, PICK(MAX_FD, 64, 5, -1), &in, &out, NULL, &limit, NULL);
		note("select = %s %08x %08x", shown(result), digest(&in, 8), digest(&out, 8));
		return;
	}
	if (one_in(2))
		result = CALL(poll, one_in(20) ? (void *)(buffers + buffers_size) : fds, count, timeout);
	else
		result = CALL(ppoll, fds, count, &limit, NULL, 8);
	for (unsigned i = 0; i < count; i++)
		snprintf(text + strlen(text), sizeof text - strlen(text), " %d:%x:%x", fds[i].fd, (unsigned short)fds[i].events, (unsigned short)fds[i].revents);
	note("poll = %s%s", shown(result), text);
}

/* Watches of names only: delegation and prefetch change when a file is opened, read, written and closed (limits.md). */
static void op_notify(void)
{
	int fd = some_fd(OF(NOTIFY));
	if (fd < 0 || one_in(6)) {
		long result = CALL(inotify_init1, IN_NONBLOCK | SOME(3, IN_CLOEXEC));
		opened(result, NOTIFY);
		note("inotify_init1 = %s", shown(result));
		return;
	}
	const char *path = some_path(false);
	long mask = SOME(2, IN_CREATE, IN_DELETE, IN_MOVED_FROM, IN_MOVED_TO, IN_DELETE_SELF, IN_MOVE_SELF) | SOME(6, IN_ONLYDIR, IN_DONT_FOLLOW, IN_ONESHOT);
	if (one_in(2)) {
		note("inotify_add_watch(%d %s %lx) = %s", fd, text_of(path), mask, shown(CALL(inotify_add_watch, fd, path, mask)));
		return;
	}
	if (one_in(6)) {
		note("inotify_rm_watch(%d) = %s", fd, shown(CALL(inotify_rm_watch, fd, PICK(1, 2, 77))));
		return;
	}
	char data[2048] __attribute__((aligned(8)));
	long result = kind_of(fd) == NOTIFY ? CALL(read, fd, data, sizeof data) : -1;
	note("inotify read(%d) = %s", fd, shown(result));
	for (long at = 0; at < result;) {
		struct inotify_event *event = (struct inotify_event *)(data + at);
		/* Cookies are numbered for the whole machine. */
		note("  watch %d mask %x cookie %d %s", event->wd, event->mask, event->cookie != 0, event->len ? event->name : "");
		at += (long)(sizeof *event + event->len);
	}
}

#endif
