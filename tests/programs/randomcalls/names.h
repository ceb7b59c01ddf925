/* Names in directories, and what stat says about them. */
#ifndef RANDOMCALLS_NAMES_H
#define RANDOMCALLS_NAMES_H

#include "files.h"
#include <dirent.h>
#include <linux/openat2.h>
#include <sys/stat.h>

static const char *const NAMES[] = { "a", "b", "c", "d", "e", "d/a", "d/b", "e/a", "d/e/a", "d/e", "x", "y" };

/* A path: mostly one of few, so that calls meet. `fifo`: may be the named pipe, which is never moved. */
static const char *some_path(bool fifo)
{
	static char paths[2][8192];
	static unsigned next;
	char *path = paths[next++ % 2];
	const char *name = NAMES[draw(sizeof NAMES / sizeof *NAMES)];
	switch (draw(40)) {
	case 0:
		return NULL;
	case 1:
		return buffers + buffers_size;
	case 2:
		/* No end before the memory ends. */
		memcpy(buffers + buffers_size - 3, "abc", 3);
		return buffers + buffers_size - 3;
	case 3:
		memcpy(buffers + buffers_size - 2, "a", 2);
		return buffers + buffers_size - 2;
	case 4:
		memset(path, 'n', 300);
		path[PICK(255, 256)] = 0;
		return path;
	case 5:
		memset(path, '/', 5000);
		memcpy(path, "a/.", 3);
		path[PICK(4095, 4096)] = 0;
		return path;
	case 6:
		return "";
	case 7:
		snprintf(path, sizeof paths[0], "%s/", name);
		return path;
	case 8:
		snprintf(path, sizeof paths[0], "././%s", name);
		return path;
	case 9:
		snprintf(path, sizeof paths[0], "d//./%s", name);
		return path;
	case 10:
		/* Never `..`: with links and descriptors it would lead out of the directory. */
		return ".";
	case 11:
		return fifo ? "p" : "missing/a";
	default:
		return name;
	}
}

/* A path as text for the log. */
static const char *text_of(const char *path)
{
	if (!path)
		return "null";
	if (path >= buffers && path <= buffers + buffers_size)
		return path == buffers + buffers_size ? "none" : "edge";
	return strnlen(path, 60) < 60 ? path : "long";
}

/* Where relative names begin. */
static int some_directory(void)
{
	return one_in(3) ? some_fd(OF(DIRECTORY)) : AT_FDCWD;
}

static const char *told(const struct stat *s)
{
	static char text[128];
	/* Sizes of directories, blocks and times are the file system's. */
	snprintf(text, sizeof text, "%o links %lu size %ld owner %u %u", s->st_mode, S_ISDIR(s->st_mode) ? 0 : (unsigned long)s->st_nlink,
		 S_ISDIR(s->st_mode) ? 0 : (long)s->st_size, s->st_uid, s->st_gid);
	return text;
}

/* The kind of an open file, from what it is and how it was opened. */
static void classify(long fd, long flags)
{
	struct stat s;
	if (fd < 0 || CALL(fstat, fd, &s) != 0)
		return;
	enum kind kind = S_ISDIR(s.st_mode) ? DIRECTORY : S_ISFIFO(s.st_mode) ? (flags & O_ACCMODE) == O_RDONLY ? PIPE_IN : PIPE_OUT : FILES;
	opened(fd, flags & O_PATH ? PATH : kind);
}

static void op_open(void)
{
	int at = some_directory();
	const char *path = some_path(true);
	long flags = PICK(O_RDONLY, O_WRONLY, O_RDWR, O_RDWR) | SOME(2, O_CREAT) |
		     SOME(8, O_EXCL, O_TRUNC, O_APPEND, O_NONBLOCK, O_DIRECTORY, O_NOFOLLOW, O_CLOEXEC, O_SYNC, O_PATH, O_DSYNC);
	long mode = PICK(0644, 0600, 0777, 0, 01777), result;
	if (strcmp(text_of(path), "p") == 0)
		flags |= O_NONBLOCK;
	if (one_in(10)) {
		struct open_how how = { .flags = (uint64_t)flags, .mode = flags & O_CREAT ? (uint64_t)mode : 0,
					.resolve = (uint64_t)SOME(4, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH, RESOLVE_IN_ROOT, RESOLVE_NO_XDEV) };
		result = CALL(openat2, at, path, &how, PICK(sizeof how, sizeof how, sizeof how, 8, 5000));
		note("openat2(%d %s %lo %llo %llx) = %s", at, text_of(path), flags, (unsigned long long)how.mode, (unsigned long long)how.resolve, shown(result));
	} else {
		result = CALL(openat, at, path, flags, mode);
		note("openat(%d %s %lo %lo) = %s", at, text_of(path), flags, mode, shown(result));
	}
	classify(result, flags);
}

static void op_stat(void)
{
	struct stat s = { 0 };
	struct statx x = { 0 };
	int fd = some_fd(~OF(CLOSED)), at = some_directory();
	const char *path = some_path(true);
	struct place place = some_place(sizeof s, false);
	bool good = place.good;
	long result;
	/* Kinds whose mode and size are the kernel's own affair are left out. */
	bool plain = (OF(kind_of(fd)) & (OF(FILES) | OF(DIRECTORY) | OF(PATH) | OF(MEMORY))) != 0;
	switch (draw(4)) {
	case 0:
		result = CALL(fstat, fd, good ? (char *)&s : place.at);
		note("fstat(%d %s) = %s %s", fd, good ? "good" : place.what, shown(result), plain ? told(&s) : "");
		break;
	case 1:
		result = one_in(2) ? CALL(stat, path, good ? (char *)&s : place.at) : CALL(lstat, path, good ? (char *)&s : place.at);
		note("stat(%s %s) = %s %s", text_of(path), good ? "good" : place.what, shown(result), told(&s));
		break;
	case 2: {
		long flags = SOME(4, AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH, AT_NO_AUTOMOUNT);
		result = CALL(newfstatat, at, path, &s, flags);
		note("fstatat(%d %s %lx) = %s %s", at, text_of(path), flags, shown(result), told(&s));
		break;
	}
	default: {
		long flags = SOME(4, AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH), mask = PICK(STATX_BASIC_STATS, STATX_ALL, STATX_SIZE, 0, 1l << 31);
		result = CALL(statx, at, path, flags, mask, &x);
		note("statx(%d %s %lx %lx) = %s %o size %llu", at, text_of(path), flags, mask, shown(result), x.stx_mode,
		     S_ISDIR(x.stx_mode) ? 0 : (unsigned long long)x.stx_size);
	}
	}
}

static void op_name(void)
{
	int at = some_directory(), to = some_directory();
	const char *path = some_path(false), *other = some_path(false);
	long mode = PICK(0644, 0755, 0, 01777, 0700), flags, result;
	char text[300];
	switch (draw(14)) {
	case 0:
		note("mkdirat(%d %s %lo) = %s", at, text_of(path), mode, shown(CALL(mkdirat, at, path, mode)));
		break;
	case 1:
		note("rmdir(%s) = %s", text_of(path), shown(CALL(rmdir, path)));
		break;
	case 2:
	case 3:
		flags = PICK(0, 0, 0, AT_REMOVEDIR, 1);
		note("unlinkat(%d %s %lx) = %s", at, text_of(path), flags, shown(CALL(unlinkat, at, path, flags)));
		break;
	case 4:
	case 5:
		flags = PICK(0, 0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE, 3, 77 << 8);
		note("renameat2(%d %s %d %s %lx) = %s", at, text_of(path), to, text_of(other), flags, shown(CALL(renameat2, at, path, to, other, flags)));
		break;
	case 6:
		flags = PICK(0, 0, AT_SYMLINK_FOLLOW, 1);
		note("linkat(%d %s %d %s %lx) = %s", at, text_of(path), to, text_of(other), flags, shown(CALL(linkat, at, path, to, other, flags)));
		break;
	case 7:
		note("symlinkat(%s %d %s) = %s", text_of(path), at, text_of(other), shown(CALL(symlinkat, path, at, other)));
		break;
	case 8: {
		size_t room = (size_t)PICK(0, 1, 5, sizeof text, sizeof text);
		memset(text, 0, sizeof text);
		result = CALL(readlinkat, at, path, text, room);
		note("readlinkat(%d %s %zu) = %s %08x", at, text_of(path), room, shown(result), digest(text, sizeof text));
		break;
	}
	case 9:
		note("fchmodat(%d %s %lo) = %s", at, text_of(path), mode, shown(CALL(fchmodat, at, path, mode)));
		break;
	case 10:
		flags = PICK(F_OK, R_OK, W_OK, X_OK, 7, 8);
		note("faccessat(%d %s %lx) = %s", at, text_of(path), flags, shown(CALL(faccessat, at, path, flags)));
		break;
	case 11: {
		struct timespec times[2] = { { 1000000 + (long)draw(1000), 5 }, { 2000000 + (long)draw(1000), PICK(7, 7, UTIME_OMIT, 1l << 40) } };
		struct stat s = { 0 };
		flags = PICK(0, 0, AT_SYMLINK_NOFOLLOW);
		result = CALL(utimensat, at, path, times, flags);
		note("utimensat(%d %s %ld) = %s", at, text_of(path), times[1].tv_sec, shown(result));
		if (result == 0 && !flags && times[1].tv_nsec == 7 && CALL(stat, path, &s) == 0 && at == AT_FDCWD && S_ISREG(s.st_mode))
			note("  times %ld %ld", s.st_mtim.tv_sec, s.st_mtim.tv_nsec);
		break;
	}
	case 12: {
		long length = PICK(0, 10, 5000, -1);
		note("truncate(%s %ld) = %s", text_of(path), length, shown(CALL(truncate, path, length)));
		break;
	}
	default: {
		int fd = some_fd(OF(FILES) | OF(PATH) | OF(DIRECTORY));
		note("fchmod(%d %lo) = %s", fd, mode, shown(CALL(fchmod, fd, mode)));
	}
	}
}

static int by_text(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The names of a directory, sorted: their order is the file system's. */
static void op_list(void)
{
	static char data[16384];
	char *names[64];
	unsigned count = 0;
	int fd = some_fd(OF(DIRECTORY));
	long result = one_in(3) ? 0 : CALL(lseek, fd, 0, SEEK_SET);
	size_t room = one_in(8) ? (size_t)PICK(0, 1, 10) : sizeof data;
	result = CALL(getdents64, fd, one_in(15) ? buffers + buffers_size : data, room);
	for (long at = 0; at < result;) {
		struct dirent64 *entry = (struct dirent64 *)(data + at);
		if (count < 64)
			names[count++] = entry->d_name;
		at += entry->d_reclen;
	}
	qsort(names, count, sizeof *names, by_text);
	uint32_t hash = 0;
	for (unsigned i = 0; i < count; i++)
		hash = hash * 31 + digest(names[i], strlen(names[i]));
	note("getdents(%d %zu) = %s, %u names %08x", fd, room, result > 0 ? "some" : shown(result), count, hash);
}

/* Working directory and mask. It always returns to the first directory, which relative names need. */
static void op_cwd(void)
{
	char text[300] = "";
	int fd = some_fd(OF(DIRECTORY));
	const char *path = some_path(false);
	size_t room = (size_t)PICK(0, 3, sizeof text, sizeof text);
	long result = one_in(2) ? CALL(chdir, path) : CALL(fchdir, fd);
	note("chdir(%s %d) = %s", text_of(path), fd, shown(result));
	result = CALL(getcwd, text, room);
	/* The first directory's own name is random. */
	const char *rest = strncmp(text, scratch, strlen(scratch)) == 0 ? text + strlen(scratch) : text;
	note("  getcwd(%zu) = %s %s", room, result > 0 ? "some" : shown(result), rest);
	if (one_in(2)) {
		struct stat s = { 0 };
		path = some_path(true);
		result = CALL(stat, path, &s);
		note("  stat(%s) = %s %s", text_of(path), shown(result), told(&s));
	}
	CHECK_IS(CALL(chdir, scratch), 0);
	if (one_in(4)) {
		long mask = PICK(022, 0, 077, 027);
		note("umask(%lo) = %s", mask, shown(CALL(umask, mask)));
	}
}

#endif
