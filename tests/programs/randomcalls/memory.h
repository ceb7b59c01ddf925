/* Memory: mappings at fixed places of one region, and what is found there. */
#ifndef RANDOMCALLS_MEMORY_H
#define RANDOMCALLS_MEMORY_H

#include "events.h"

enum { REGION = 48 };
static char *region;
/* The files that are mapped are not changed: a mapping away is a snapshot (limits.md). */
static int map_small = -1, map_large = -1;

static sigjmp_buf out_of_fault;
static volatile sig_atomic_t probing;
static siginfo_t fault;

static void on_fault(int sig, siginfo_t *info, void *context)
{
	(void)context;
	if (!probing) {
		note("unexpected fault %d code %d at %p", sig, info->si_code, info->si_addr);
		flush_log();
		_exit(97);
	}
	fault = *info;
	siglongjmp(out_of_fault, 1);
}

/* Reads or writes one byte; -1 if it faults. */
static int probe(volatile char *at, bool writes, char value)
{
	int got = -1;
	probing = 1;
	if (sigsetjmp(out_of_fault, 1) == 0) {
		if (writes)
			*at = value;
		got = (unsigned char)*at;
	}
	probing = 0;
	return got;
}

static const char *faulted(void)
{
	static char text[64];
	snprintf(text, sizeof text, "signal %d code %d at %ld", fault.si_signo, fault.si_code, (long)((char *)fault.si_addr - region));
	return text;
}

static void op_touch(void)
{
	char *at = region + draw(REGION) * PAGE + (size_t)PICK(0, 1, 100, PAGE - 1);
	bool writes = one_in(2);
	int got = probe(at, writes, (char)draw(256));
	note("%s(%ld) = %d %s", writes ? "poke" : "peek", (long)(at - region), got, got < 0 ? faulted() : "");
}

/* All pages: which can be read, and their content. */
static void op_survey(void)
{
	char text[REGION + 1] = "";
	uint32_t hash = 0;
	for (int i = 0; i < REGION; i++) {
		bool good = probe(region + i * PAGE, false, 0) >= 0;
		text[i] = good ? 'r' : fault.si_signo == SIGBUS ? 'b' : fault.si_code == SEGV_ACCERR ? 'a' : '-';
		if (good)
			hash = hash * 31 + digest(region + i * PAGE, PAGE);
	}
	note("survey %s %08x", text, hash);
}

static void op_map(void)
{
	size_t at = draw(REGION), length = 1 + draw(REGION - at < 8 ? REGION - at : 8);
	long protection = PICK(PROT_READ, PROT_READ | PROT_WRITE, PROT_READ | PROT_WRITE, PROT_READ | PROT_WRITE, PROT_NONE);
	long offset = 0, result, extra = PICK(0, 0, 0, -1, -PAGE + 1, 100);
	int fd = -1;
	long flags = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | SOME(8, MAP_NORESERVE, MAP_POPULATE);
	switch (draw(8)) {
	case 0:
	case 1:
		fd = one_in(2) ? map_small : map_large;
		flags = MAP_FIXED | MAP_PRIVATE | SOME(8, MAP_POPULATE);
		offset = PICK(0, 0, PAGE, 2 * PAGE, 100, 1l << 40);
		break;
	case 2:
		fd = one_in(2) ? map_small : map_large;
		flags = MAP_FIXED | MAP_SHARED;
		protection = PROT_READ;
		break;
	case 3:
		if (me.families[F_SHARE])
			flags = MAP_FIXED | MAP_SHARED | MAP_ANONYMOUS;
		break;
	case 4:
		if (one_in(3))
			flags = PICK(MAP_FIXED | MAP_ANONYMOUS, MAP_FIXED_NOREPLACE | MAP_PRIVATE | MAP_ANONYMOUS, MAP_FIXED | MAP_PRIVATE);
		break;
	default:
		break;
	}
	result = CALL(mmap, region + at * PAGE + (one_in(20) ? 5 : 0), one_in(20) ? 0 : length * PAGE + (size_t)extra, protection, flags, fd, offset);
	note("mmap(%zu %zu %ld prot %ld flags %lx %d %ld) = %s", at, length, extra, protection, flags, fd < 0 ? -1 : fd == map_small, offset,
	     result == -1 ? shown(result) : shown(result - (long)region));
}

static void op_unmap(void)
{
	size_t at = draw(REGION), length = 1 + draw(REGION - at < 8 ? REGION - at : 8), to = draw(REGION - 8), more = 1 + draw(8);
	char *from = region + at * PAGE;
	long protection = PICK(PROT_READ, PROT_READ | PROT_WRITE, PROT_READ | PROT_WRITE, PROT_NONE, 1 << 20), result, flags;
	switch (draw(6)) {
	case 0:
		result = CALL(munmap, from + (one_in(15) ? 1 : 0), length * PAGE);
		note("munmap(%zu %zu) = %s", at, length, shown(result));
		break;
	case 1:
	case 2:
		note("mprotect(%zu %zu %ld) = %s", at, length, protection, shown(CALL(mprotect, from, length * PAGE, protection)));
		break;
	case 3:
		/* One page: neighbours can be one mapping after a move, and two at home (limits.md). To a fixed place, or
		 * within the old one. */
		length = 1;
		flags = PICK(MREMAP_MAYMOVE | MREMAP_FIXED, MREMAP_MAYMOVE | MREMAP_FIXED, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, MREMAP_FIXED);
		result = CALL(mremap, from, length * PAGE, more * PAGE, flags, region + to * PAGE);
		note("mremap(%zu %zu %zu %lx %zu) = %s", at, length, more, flags, to, result == -1 ? shown(result) : shown(result - (long)region));
		break;
	case 4:
		length = 1;
		if (!one_in(2))
			more = length;
		/* The page behind the region is used, so that it does not grow there. */
		result = CALL(mremap, from, length * PAGE, more * PAGE, 0, 0);
		note("mremap(%zu %zu %zu) = %s", at, length, more, result == -1 ? shown(result) : shown(result - (long)region));
		break;
	default:
		result = CALL(mmap, from, length * PAGE, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		for (size_t i = 0; result != -1 && i < length; i++)
			random_data(from + i * PAGE, 64);
		note("fresh(%zu %zu) = %s", at, length, result == -1 ? shown(result) : "there");
	}
}

static void op_advise(void)
{
	size_t at = draw(REGION), length = 1 + draw(REGION - at < 8 ? REGION - at : 8);
	char *from = region + at * PAGE + (one_in(20) ? 7 : 0);
	unsigned char resident[REGION];
	long advice = PICK(MADV_NORMAL, MADV_DONTNEED, MADV_DONTNEED, MADV_WILLNEED, MADV_SEQUENTIAL, MADV_DONTFORK, MADV_DOFORK, MADV_WIPEONFORK,
			   MADV_KEEPONFORK, 22, 23, MADV_DONTDUMP, MADV_NOHUGEPAGE, 77);
	long flags = PICK(MS_ASYNC, MS_SYNC, MS_SYNC | MS_ASYNC, MS_INVALIDATE, 64);
	switch (draw(6)) {
	case 0:
		/* Which pages are in memory is left out: a move changes it. */
		note("mincore(%zu %zu) = %s", at, length, shown(CALL(mincore, from, length * PAGE, one_in(10) ? NULL : resident)));
		break;
	case 1:
		note("mlock(%zu %zu) = %s", at, length, shown(one_in(2) ? CALL(mlock, from, length * PAGE) : CALL(munlock, from, length * PAGE)));
		/* Shared memory is not locked again after a move (limits.md), so it does not stay locked. */
		for (int i = 0; i < REGION; i++)
			CALL(munlock, region + i * PAGE, PAGE);
		break;
	case 2:
		note("msync(%zu %zu %ld) = %s", at, length, flags, shown(CALL(msync, from, length * PAGE, flags)));
		break;
	default:
		note("madvise(%zu %zu %ld) = %s", at, length, advice, shown(CALL(madvise, from, length * PAGE, advice)));
	}
}

static void op_brk(void)
{
	char *end = (char *)CALL(brk, 0);
	long pages = 1 + (long)draw(6);
	long grown = CALL(brk, end + pages * PAGE) - (long)end;
	uint32_t zero = digest(end, (size_t)grown);
	memset(end, 7, (size_t)grown);
	long shrunk = CALL(brk, end) - (long)end;
	note("brk(%ld) = %ld %08x, back %ld, wrong %ld", pages, grown, zero, shrunk, CALL(brk, 1) - (long)end);
}

/* Calls of the kernel with memory of the region. */
static void op_pass(void)
{
	char *at = region + draw(REGION) * PAGE + draw(PAGE - 200);
	int fd = some_fd(OF(FILES) | OF(MEMORY)), to = some_fd(OF(FILES) | OF(MEMORY) | OF(PIPE_OUT) | OF(SOCKET));
	bool readable = probe(at, false, 0) >= 0, writable = readable && probe(at, true, 3) >= 0;
	long result;
	switch (draw(5)) {
	case 0:
		/* As for other writes of bad memory to a file. */
		if (readable || !(OF(kind_of(to)) & (OF(FILES) | OF(MEMORY))))
			note("region write(%d %ld) = %s", to, (long)(at - region), shown_if(readable, CALL(write, to, at, 100)));
		break;
	case 1:
		note("region pread(%d %ld) = %s", fd, (long)(at - region), shown_if(writable, CALL(pread64, fd, at, 100, 0)));
		break;
	case 2:
		result = CALL(uname, at - (at - region) % PAGE);
		note("region uname(%ld) = %s", (long)(at - region) / PAGE, shown(result));
		/* The host's name differs. */
		if (result == 0)
			memset(at - (at - region) % PAGE, 1, 400);
		break;
	case 3:
		result = CALL(openat, AT_FDCWD, at, O_RDONLY);
		note("region open(%ld) = %s", (long)(at - region), result >= 0 ? "opened" : shown(result));
		if (result >= 0)
			close((int)result);
		break;
	default: {
		struct iovec here = { buffers, 100 }, there = { at, 100 };
		if (me.families[F_HOMEWARD]) {
			result = CALL(process_vm_readv, getpid(), &here, 1, &there, 1, 0);
			note("region vm_readv(%ld) = %s %08x", (long)(at - region), shown(result), result > 0 ? digest(buffers, (size_t)result) : 0);
		}
	}
	}
}

/* A file that is written through a mapping: only at home. */
static void op_mapped_write(void)
{
	int fd = (int)CALL(openat, AT_FDCWD, "w", O_RDWR | O_CREAT, 0644);
	if (fd < 0)
		return;
	CALL(ftruncate, fd, 3 * PAGE);
	char *at = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at != MAP_FAILED) {
		char text[32] = "";
		random_data(at + PAGE - 10, 20);
		CALL(pread64, fd, text, 20, PAGE - 10);
		CALL(pwrite64, fd, "written", 7, 5000);
		note("mapped %08x %.7s", digest(text, sizeof text), at + 5000);
		munmap(at, 3 * PAGE);
	}
	close(fd);
}

#endif
