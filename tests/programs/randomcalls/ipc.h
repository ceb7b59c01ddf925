/* System V semaphores and message queues, POSIX message queues, and requests about descriptors. */
#ifndef RANDOMCALLS_IPC_H
#define RANDOMCALLS_IPC_H

#include "limits.h"
#include <mqueue.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/sem.h>
#include <sys/xattr.h>

/* The first actor's, which removes them at its end. A program that was executed has none. */
static int semaphores = -1, queue = -1;

static void begin_ipc(void)
{
	semaphores = (int)CALL(semget, IPC_PRIVATE, 3, IPC_CREAT | 0600);
	queue = (int)CALL(msgget, IPC_PRIVATE, IPC_CREAT | 0600);
}

static void end_ipc(void)
{
	CALL(semctl, semaphores, 0, IPC_RMID, 0);
	CALL(msgctl, queue, IPC_RMID, NULL);
}

static void op_semaphore(void)
{
	struct sembuf operations[3];
	size_t count = 1 + draw(3);
	long number = PICK(0, 1, 2, 3, -1), value = PICK(0, 1, 5, 32767, 32768, -1), result;
	for (size_t i = 0; i < count; i++)
		operations[i] = (struct sembuf){ (unsigned short)PICK(0, 1, 2, 2, 3), (short)PICK(0, 1, 1, 2, -1, -1, -3), (short)(IPC_NOWAIT | SOME(4, SEM_UNDO)) };
	switch (draw(5)) {
	case 0:
		note("semctl setval(%ld %ld) = %s", number, value, shown(CALL(semctl, semaphores, number, SETVAL, value)));
		break;
	case 1:
		note("semctl getval(%ld) = %s", number, shown(CALL(semctl, semaphores, number, GETVAL, 0)));
		break;
	case 2:
		result = CALL(semctl, semaphores, number, GETPID, 0);
		note("semctl getpid(%ld) = %s", number, result > 0 ? "some" : shown(result));
		break;
	default:
		result = CALL(semop, semaphores, one_in(20) ? (void *)(buffers + buffers_size) : operations, one_in(20) ? PICK(0, 100000) : (long)count);
		note("semop(%zu: %d %d) = %s", count, operations[0].sem_num, operations[0].sem_op, shown(result));
	}
}

static void op_message(void)
{
	struct {
		long type;
		char text[600];
	} message = { PICK(1, 2, 3, 3, 0), "" };
	size_t length = (size_t)PICK(0, 1, 100, 600, 600, -1);
	long type = PICK(0, 0, 1, 2, -2, 3), flags = IPC_NOWAIT | SOME(5, MSG_NOERROR, MSG_EXCEPT), result;
	if (one_in(2)) {
		random_data(message.text, sizeof message.text);
		result = CALL(msgsnd, queue, &message, length, IPC_NOWAIT);
		note("msgsnd(%ld %zu) = %s", message.type, length, shown(result));
		return;
	}
	result = CALL(msgrcv, queue, &message, length, type, flags);
	note("msgrcv(%ld %zu %lx) = %s of %ld %08x", type, length, flags, shown(result), result >= 0 ? message.type : 0, digest(message.text, sizeof message.text));
}

/* A queue whose name is gone as soon as it is open. */
static void op_mqueue(void)
{
	char name[40], text[128] = "";
	unsigned priority = 0;
	struct mq_attr attributes = { .mq_maxmsg = PICK(1, 3, 0), .mq_msgsize = PICK(16, 100) }, got = { 0 };
	struct timespec past = { 1, 0 };
	snprintf(name, sizeof name, "tern-calls-%d", (int)getpid());
	int fd = (int)CALL(mq_open, name, O_CREAT | O_EXCL | O_RDWR | O_NONBLOCK, 0600, &attributes);
	note("mq_open(%ld %ld) = %s", attributes.mq_maxmsg, attributes.mq_msgsize, shown(fd));
	CALL(mq_unlink, name);
	if (fd < 0)
		return;
	for (int i = 0; i < 3; i++) {
		size_t length = (size_t)PICK(0, 1, 16, 17, 100);
		random_data(text, sizeof text);
		note("  mq_timedsend(%zu) = %s", length, shown(CALL(mq_timedsend, fd, text, length, draw(4), &past)));
	}
	for (int i = 0; i < 2; i++) {
		size_t length = (size_t)PICK(16, 100, 5);
		memset(text, 0, sizeof text);
		long result = CALL(mq_timedreceive, fd, text, length, one_in(3) ? NULL : &priority, &past);
		note("  mq_timedreceive(%zu) = %s priority %u %08x", length, shown(result), priority, digest(text, sizeof text));
	}
	long result = CALL(mq_getsetattr, fd, NULL, &got);
	note("  mq_getattr = %s %ld %ld %ld", shown(result), got.mq_maxmsg, got.mq_msgsize, got.mq_curmsgs);
	close(fd);
}

static void op_request(void)
{
	int fd = some_fd(~OF(CLOSED) & ~OF(TIMER)), value = 0;
	long result;
	switch (draw(6)) {
	case 0:
		result = CALL(ioctl, fd, FIONREAD, &value);
		note("ioctl fionread(%d) = %s %d", fd, shown(result), value);
		break;
	case 1:
		note("ioctl cloexec(%d) = %s", fd, shown(CALL(ioctl, fd, one_in(2) ? FIOCLEX : FIONCLEX)));
		break;
	case 2: {
		char window[8] = "";
		result = CALL(ioctl, fd, one_in(2) ? TIOCGWINSZ : TIOCGPGRP, window);
		note("ioctl terminal(%d) = %s", fd, shown(result));
		break;
	}
	case 3:
		fd = some_fd(OF(FILES) | OF(MEMORY) | OF(PIPE_IN));
		note("fadvise(%d) = %s", fd, shown(CALL(fadvise64, fd, 0, PICK(0, 100, -1), PICK(0, 1, 2, 3, 4, 5, 9))));
		break;
	case 4: {
		char data[40] = "";
		fd = some_fd(OF(FILES) | OF(DIRECTORY));
		result = one_in(2) ? CALL(fsetxattr, fd, one_in(4) ? "other" : "user.one", "value", PICK(0, 5), PICK(0, 0, XATTR_CREATE, XATTR_REPLACE)) :
				     CALL(fgetxattr, fd, "user.one", data, PICK(0, 2, 40));
		note("xattr(%d) = %s %s", fd, shown(result), data);
		break;
	}
	default: {
		int other = some_fd(OF(FILES) | OF(MEMORY));
		fd = some_fd(OF(FILES) | OF(MEMORY));
		result = CALL(kcmp, getpid(), getpid(), 0, fd, other);
		note("kcmp(%d %d) = %s", fd, other, result > 0 ? "different" : shown(result));
	}
	}
}

#endif
