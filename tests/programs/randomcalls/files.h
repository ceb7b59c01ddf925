/* Open files: their content, offsets, descriptors and locks. */
#ifndef RANDOMCALLS_FILES_H
#define RANDOMCALLS_FILES_H

#include "core.h"
#include <sys/file.h>
#include <sys/sendfile.h>

static enum kind kind_of(int fd)
{
	return fd >= 0 && fd < MAX_FD ? me.kinds[fd] : CLOSED;
}

static void op_read(void)
{
	int fd = some_fd(one_in(3) ? STREAMS : OF(FILES) | OF(MEMORY));
	size_t length = some_length();
	unsigned how = (unsigned)draw(5);
	/* Memory that ends too early, where syscalls.md names no difference: a file, from its own offset. */
	bool file = fd >= 3 && fd < MAX_FD && (OF(me.kinds[fd]) & (OF(FILES) | OF(MEMORY))) && how <= 1;
	struct place place = some_place(length, file);
	/* An eventfd is emptied before the kernel finds that the memory is bad; away it is not (syscalls.md). */
	if (!place.good && !file && kind_of(fd) != DIRECTORY)
		place = (struct place){ buffers, "buffer", true };
	long offset = PICK(0, 0, 1, 100, PAGE, 9999, 70000, -1);
	size_t half = draw(length + 1);
	long result;
	fill(place, length);
	/* Two segments in good memory, one otherwise. */
	struct iovec parts[2] = { { place.at, place.good ? half : length }, { place.at + half, place.good ? length - half : 0 } };
	switch (how) {
	case 0:
	case 1:
		result = CALL(read, fd, place.at, length);
		break;
	case 2:
		result = CALL(pread64, fd, place.at, length, offset);
		break;
	case 3:
		result = CALL(readv, fd, parts, PICK(1, 2, 2, 2, 0, -1, 1025));
		break;
	default:
		result = CALL(preadv2, fd, parts, 2, offset, 0, PICK(0, 0, 0, 0x8000, 1 << 20));
	}
	note("read%u(%d %s %zu %zu %ld) = %s %08x", how, fd, place.what, length, half, offset, shown_if(place.good, result), content(place, length));
}

static void op_write(void)
{
	int fd = some_fd(one_in(3) ? STREAMS : OF(FILES) | OF(MEMORY));
	size_t length = some_length();
	/* Writing the beginning of memory that ends too early: syscalls.md names the difference. */
	struct place place = some_place(length, false);
	/* A file of memory may grow although the data cannot be read; away the memory is read first. */
	if (!place.good && (OF(kind_of(fd)) & (OF(FILES) | OF(MEMORY))))
		place = (struct place){ buffers, "buffer", true };
	long offset = PICK(0, 0, 1, 100, PAGE, 9999, 70000, -1);
	size_t half = draw(length + 1);
	long result;
	if (place.good && length)
		random_data(place.at, length);
	struct iovec parts[2] = { { place.at, place.good ? half : length }, { place.at + half, place.good ? length - half : 0 } };
	unsigned how = (unsigned)draw(5);
	switch (how) {
	case 0:
	case 1:
		result = CALL(write, fd, place.at, length);
		break;
	case 2:
		result = CALL(pwrite64, fd, place.at, length, offset);
		break;
	case 3:
		result = CALL(writev, fd, parts, PICK(1, 2, 2, 2, 0, -1, 1025));
		break;
	default:
		result = CALL(pwritev2, fd, parts, 2, offset, 0, PICK(0, 0, RWF_APPEND, RWF_SYNC, RWF_DSYNC, 1 << 20));
	}
	note("write%u(%d %s %zu %zu %ld) = %s", how, fd, place.what, length, half, offset, shown_if(place.good, result));
}

static void op_seek(void)
{
	int fd = some_fd(OF(FILES) | OF(MEMORY));
	long offset = PICK(0, 0, 1, 10, -1, -10, PAGE, 5000, 1l << 33, LONG_MIN), how = PICK(SEEK_SET, SEEK_SET, SEEK_CUR, SEEK_CUR, SEEK_END, SEEK_END, 17);
	note("lseek(%d %ld %ld) = %s", fd, offset, how, shown(CALL(lseek, fd, offset, how)));
}

static void op_resize(void)
{
	int fd = some_fd(OF(FILES) | OF(MEMORY));
	long length = PICK(0, 0, 1, 100, PAGE, PAGE + 1, 50000, 200000, -1), from = PICK(0, 0, 3, PAGE, 30000, -1);
	long mode = PICK(0, 0, 1, 1, 0x10, 0x100, 3);
	switch (draw(4)) {
	case 0:
	case 1:
		note("ftruncate(%d %ld) = %s", fd, length, shown(CALL(ftruncate, fd, length)));
		break;
	case 2:
		/* 0 and KEEP_SIZE, punching, and modes that do not exist; others depend on the file system. */
		note("fallocate(%d %ld %ld %ld) = %s", fd, mode, from, length, shown(CALL(fallocate, fd, mode == 0x10 ? 3 : mode, from, length)));
		break;
	default:
		note("sync(%d) = %s", fd, shown(one_in(2) ? CALL(fsync, fd) : CALL(fdatasync, fd)));
	}
}

static void op_descriptor(void)
{
	int fd = some_fd(~OF(CLOSED));
	enum kind kind = kind_of(fd);
	int to = 3 + (int)draw(MAX_FD - 3);
	long result, minimum = PICK(3, 5, 20, MAX_FD - 2, -1, 1 << 20);
	switch (draw(9)) {
	case 0:
		result = CALL(dup, fd);
		opened(result, kind);
		note("dup(%d) = %s", fd, shown(result));
		break;
	case 1:
		result = CALL(dup2, fd, to);
		opened(result, kind);
		note("dup2(%d %d) = %s", fd, to, shown(result));
		break;
	case 2: {
		long flags = PICK(0, O_CLOEXEC, O_CLOEXEC, O_APPEND);
		result = CALL(dup3, fd, to, flags);
		opened(result, kind);
		note("dup3(%d %d %ld) = %s", fd, to, flags, shown(result));
		break;
	}
	case 3: {
		long command = PICK(F_DUPFD, F_DUPFD_CLOEXEC);
		result = CALL(fcntl, fd, command, minimum);
		opened(result, kind);
		note("fcntl(%d %ld %ld) = %s", fd, command, minimum, shown(result));
		break;
	}
	case 4: {
		long command = PICK(F_GETFD, F_GETFL, F_GETOWN, F_GETSIG, F_GET_SEALS, F_GETPIPE_SZ);
		result = CALL(fcntl, fd, command, 0);
		note("fcntl(%d %ld) = %s", fd, command, shown(result));
		break;
	}
	case 5: {
		long flag = PICK(0, FD_CLOEXEC, 2);
		note("setfd(%d %ld) = %s", fd, flag, shown(CALL(fcntl, fd, F_SETFD, flag)));
		break;
	}
	case 6: {
		/* Pipes and sockets stay non-blocking: nobody else would end a wait. */
		long flags = (OF(kind) & (OF(FILES) | OF(MEMORY)) ? 0 : O_NONBLOCK) | SOME(3, O_APPEND, O_NONBLOCK, O_NOATIME);
		note("setfl(%d %lo) = %s", fd, flags, shown(CALL(fcntl, fd, F_SETFL, flags)));
		break;
	}
	case 7:
		if (one_in(3)) {
			unsigned first = 3 + (unsigned)draw(MAX_FD), last = first + (unsigned)draw(3);
			result = CALL(close_range, first, last, 0);
			note("close_range(%u %u) = %s", first, last, shown(result));
			for (unsigned i = first; result == 0 && i <= last && i < MAX_FD; i++)
				me.kinds[i] = CLOSED;
			break;
		}
		/* fall through */
	default:
		result = CALL(close, fd);
		note("close(%d) = %s", fd, shown(result));
		if (fd >= 3 && fd < MAX_FD)
			me.kinds[fd] = CLOSED;
	}
}

static void op_lock(void)
{
	int fd = some_fd(OF(FILES) | OF(FILES) | OF(DIRECTORY));
	struct stat file;
	/* Other programs lock the same device, or the one inode of all eventfds, epoll sets and the like. */
	if (fstat(fd, &file) == 0 && !S_ISREG(file.st_mode) && !S_ISDIR(file.st_mode))
		return;
	if (one_in(3)) {
		long how = PICK(LOCK_SH, LOCK_EX, LOCK_UN, 77) | LOCK_NB;
		note("flock(%d %ld) = %s", fd, how, shown(CALL(flock, fd, how)));
		return;
	}
	/* SETLKW only to unlock: nobody else would end a wait. */
	long command = PICK(F_GETLK, F_SETLK, F_SETLK, F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLK);
	struct flock lock = { .l_type = (short)PICK(F_RDLCK, F_WRLCK, F_UNLCK), .l_whence = (short)PICK(SEEK_SET, SEEK_SET, SEEK_CUR, SEEK_END, 9),
			      .l_start = PICK(0, 0, 10, 100, -1), .l_len = PICK(0, 10, 100, -5), .l_pid = one_in(20) ? 7 : 0 };
	struct flock *at = one_in(20) ? (struct flock *)(buffers + buffers_size) : &lock;
	long type = lock.l_type, start = lock.l_start, length = lock.l_len, whence = lock.l_whence;
	long result = CALL(fcntl, fd, command, at);
	note("lock(%d %ld %ld %ld %ld %ld) = %s type %d from %ld length %ld of %s", fd, command, type, whence, start, length, shown(result),
	     lock.l_type, (long)lock.l_start, (long)lock.l_len, lock.l_pid == -1 ? "file" : who(lock.l_pid));
}

/* A sendfile or copy_file_range, continued where a move cuts it short (limits.md). */
static long whole_copy(bool is_sendfile, int from, long *at, int to, long *into, size_t length, long flags)
{
	size_t done = 0;
	long result;
	do {
		if (is_sendfile)
			result = CALL(sendfile, to, from, at, length - done);
		else
			result = CALL(copy_file_range, from, at, to, into, length - done, flags);
		done += result > 0 ? (size_t)result : 0;
	} while (result > 0 && done < length);
	return done ? (long)done : result;
}

static void op_copy(void)
{
	int from = some_fd(OF(FILES) | OF(PIPE_IN) | OF(MEMORY)), to = some_fd(OF(FILES) | OF(PIPE_OUT) | OF(SOCKET) | OF(MEMORY));
	int in = some_fd(OF(PIPE_IN)), out = some_fd(OF(PIPE_OUT));
	long at = PICK(0, 0, 10, PAGE, -1), into = PICK(0, 10, PAGE);
	size_t length = some_length() % 20000;
	long *at_pointer = one_in(2) ? &at : one_in(10) ? (long *)(buffers + buffers_size) : NULL, *into_pointer = one_in(2) ? &into : NULL;
	long result;
	bool to_file = kind_of(to) == FILES || kind_of(to) == MEMORY;
	switch (draw(4)) {
	case 0:
		result = whole_copy(true, from, at_pointer, to, NULL, length, 0);
		note("sendfile(%d %d %d %zu) = %s at %ld", to, from, at_pointer == &at, length, shown(result), at);
		break;
	case 1:
		result = whole_copy(false, from, at_pointer, to, into_pointer, length, PICK(0, 0, 0, 1));
		note("copy_file_range(%d %d %d %d %zu) = %s at %ld into %ld", from, at_pointer == &at, to, into_pointer != NULL, length, shown(result), at, into);
		break;
	case 2:
		if (one_in(2))
			result = CALL(splice, in, NULL, to, to_file ? into_pointer : NULL, length, SPLICE_F_NONBLOCK);
		else
			result = CALL(splice, from, at_pointer, out, NULL, length, SPLICE_F_NONBLOCK);
		note("splice(%d %d %d %d %zu) = %s at %ld into %ld", in, to, from, out, length, shown(result), at, into);
		break;
	default:
		result = CALL(tee, in, out, length, PICK(SPLICE_F_NONBLOCK, SPLICE_F_NONBLOCK, SPLICE_F_NONBLOCK | 1 << 9));
		note("tee(%d %d %zu) = %s", in, out, length, shown(result));
	}
}

#endif
