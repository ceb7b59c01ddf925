/* Proves: file calls that are made very often have the same results as rare ones: each record is
 * read once and written once, by the program or by a handler that interrupts it anywhere; calls
 * with bad buffers fail and move no offset; registers, the red zone and the program's own code are
 * unchanged. The process's CPU time continues, and agrees with getrusage. */
#include "program.h"
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>

enum { RECORDS = 30000, BLOCK = 512, CODE = 48 };
static int in = -1, out = -1;
static unsigned char taken[RECORDS];
static volatile long by_handler, said, wrong;
static volatile bool disturbed;

static uint64_t record(uint64_t n)
{
	return n * 0x9e3779b97f4a7c15u ^ n;
}

/* Reads the next record, in the program or the handler. */
static bool take(void)
{
	uint64_t got[2];
	ssize_t n = read(in, got, sizeof got);
	if (n == 0)
		return false;
	if (n != sizeof got || got[1] != record(got[0]) || got[0] >= RECORDS)
		wrong++;
	else
		taken[got[0]]++;
	return true;
}

/* Records written by the handler contain 1. */
static void put(uint64_t who, uint64_t n)
{
	uint64_t line[2] = { who << 32 | n, record(n) };
	if (write(out, line, sizeof line) != sizeof line)
		wrong++;
}

/* In nanoseconds. */
static int64_t cpu_time(void)
{
	struct timespec now;
	if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now) != 0 || now.tv_nsec < 0 || now.tv_nsec >= 1000000000)
		wrong++;
	return now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Whether the CPU clock agrees with getrusage, which is read between two readings of the clock. */
static bool is_right(void)
{
	struct rusage used;
	int64_t first = cpu_time();
	CHECK_IS(getrusage(RUSAGE_SELF, &used), 0);
	int64_t both = (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000000 + used.ru_utime.tv_usec + used.ru_stime.tv_usec;
	return both >= first / 1000 - 2 && both <= cpu_time() / 1000 + 2;
}

/* The CPU time must not be less than the last value returned, unless the process has come home
 * meanwhile. In that case the new value agrees with getrusage; a further move may disturb the
 * comparison, so it is repeated. */
static void time_goes_on(int64_t *last, bool compare)
{
	int64_t now = cpu_time();
	if ((compare || now < *last) && !is_right() && !is_right() && !is_right())
		wrong++;
	*last = now < *last ? 0 : now;
}

/* One-shot, set again when the handler is done: a periodic timer would leave the program no time
 * where the handler takes longer than the period. */
static void alarm_soon(void)
{
	struct itimerval soon = { { 0, 0 }, { 0, 1500 } };
	CHECK_IS(setitimer(ITIMER_REAL, &soon, NULL), 0);
}

static void on_alarm(int signal)
{
	static int64_t time;
	static int times;
	(void)signal;
	int kept = errno;
	if (times++ % 4 == 0)
		time_goes_on(&time, false);
	if (in >= 0 && take())
		by_handler++;
	if (in >= 0 && lseek(in, 0, SEEK_CUR) % 16 != 0)
		wrong++;
	if (out >= 0)
		put(1, (uint64_t)said++);
	if (disturbed)
		alarm_soon();
	errno = kept;
}

static void disturb(bool on)
{
	struct itimerval never = { 0 };
	disturbed = on;
	if (on)
		alarm_soon();
	else
		CHECK_IS(setitimer(ITIMER_REAL, &never, NULL), 0);
}

static void make_records(void)
{
	uint64_t some[BLOCK][2];
	int fd = open("records", O_WRONLY | O_CREAT | O_TRUNC, 0600);
	CHECK(fd >= 0);
	for (uint64_t n = 0; n < RECORDS;) {
		int count = 0;
		for (; count < BLOCK && n < RECORDS; count++, n++)
			some[count][0] = n, some[count][1] = record(n);
		CHECK_IS(write(fd, some, 16 * (size_t)count), 16 * count);
	}
	CHECK_IS(close(fd), 0);
	/* Wait until the file is old enough for its content to be cached. */
	rest_ms(30);
}

static void each_is_read_once(void)
{
	int fd = open("records", O_RDONLY);
	CHECK(fd >= 0);
	memset(taken, 0, sizeof taken);
	in = fd;
	int64_t time = 0;
	disturb(true);
	for (int n = 0; take(); n++)
		if (n % 8 == 0)
			time_goes_on(&time, n % 4000 == 0);
	disturb(false);
	in = -1;
	CHECK_IS(wrong, 0);
	for (int n = 0; n < RECORDS; n++)
		CHECK_IS(taken[n], 1);
	/* Across the end, at it, and beyond it. */
	char some[64];
	CHECK_IS(lseek(fd, RECORDS * 16 - 10, SEEK_SET), RECORDS * 16 - 10);
	CHECK_IS(read(fd, some, 64), 10);
	CHECK_IS(read(fd, some, 64), 0);
	CHECK_IS(pread(fd, some, 64, RECORDS * 16 + 5), 0);
	CHECK_IS(lseek(fd, 0, SEEK_CUR), RECORDS * 16);
	CHECK(pread(fd, some, 64, -1) == -1 && errno == EINVAL);
	CHECK(lseek(fd, -1, SEEK_SET) == -1 && errno == EINVAL);
	CHECK_IS(close(fd), 0);
}

static void each_is_written_once(void)
{
	int fd = open("lines", O_RDWR | O_CREAT | O_TRUNC, 0600);
	CHECK(fd >= 0);
	said = 0;
	out = fd;
	disturb(true);
	for (uint64_t n = 0; n < RECORDS; n++)
		put(0, n);
	disturb(false);
	out = -1;
	CHECK_IS(wrong, 0);
	CHECK_IS(lseek(fd, 0, SEEK_CUR), 16 * (RECORDS + said));
	CHECK_IS(lseek(fd, 0, SEEK_SET), 0);
	uint64_t some[BLOCK][2], next[2] = { 0, 0 };
	ssize_t n;
	while ((n = read(fd, some, sizeof some)) > 0) {
		CHECK_IS(n % 16, 0);
		for (int i = 0; i < n / 16; i++) {
			uint64_t who = some[i][0] >> 32, number = some[i][0] & 0xffffffff;
			CHECK(who < 2);
			CHECK_IS(number, next[who]++);
			CHECK(some[i][1] == record(number));
		}
	}
	CHECK_IS(n, 0);
	CHECK(next[0] == RECORDS && next[1] == (uint64_t)said);
	CHECK_IS(close(fd), 0);
	CHECK_IS(unlink("lines"), 0);
}

/* Buffers that cannot be read or written, first before calls are on the fast path, then after
 * that. */
static void bad_buffers(char *nowhere)
{
	uint64_t got[2];
	char *volatile zero = NULL;
	int fd = open("records", O_RDONLY), to = open("some", O_WRONLY | O_CREAT | O_TRUNC, 0600);
	CHECK(fd >= 0 && to >= 0);
	for (int n = 0; n < 400; n++) {
		CHECK_IS(read(fd, got, 16), 16);
		CHECK_IS(got[0], n);
		CHECK_IS(write(to, got, 16), 16);
		if (n % 50)
			continue;
		CHECK(read(fd, nowhere, 16) == -1 && errno == EFAULT);
		CHECK(read(fd, zero, 16) == -1 && errno == EFAULT);
		CHECK(pread(fd, nowhere, 16, 32) == -1 && errno == EFAULT);
		CHECK(write(to, nowhere, 16) == -1 && errno == EFAULT);
		CHECK(write(fd, got, 16) == -1 && errno == EBADF);
		CHECK(read(to, got, 16) == -1 && errno == EBADF);
		CHECK_IS(read(fd, got, 0), 0);
		CHECK(lseek(fd, 0, 77) == -1 && errno == EINVAL);
		CHECK_IS(lseek(fd, 0, SEEK_CUR), 16 * (n + 1));
		CHECK_IS(lseek(to, 0, SEEK_CUR), 16 * (n + 1));
	}
	/* A child continues at its parent's offset, and the parent after the child's. */
	pid_t child = fork();
	CHECK(child >= 0);
	if (!child) {
		for (int n = 400; n < 600; n++) {
			CHECK_IS(read(fd, got, 16), 16);
			CHECK_IS(got[0], n);
			CHECK_IS(write(to, got, 16), 16);
		}
		_exit(0);
	}
	await_exit(child, 0);
	for (int n = 600; n < 800; n++) {
		CHECK_IS(read(fd, got, 16), 16);
		CHECK_IS(got[0], n);
		CHECK_IS(write(to, got, 16), 16);
	}
	CHECK_IS(close(to), 0);
	to = open("some", O_RDONLY);
	for (int n = 0; n < 800; n++) {
		CHECK_IS(read(to, got, 16), 16);
		CHECK(got[0] == (uint64_t)n && got[1] == record(got[0]));
	}
	CHECK(close(to) == 0 && close(fd) == 0 && unlink("some") == 0);
}

static uint64_t before[13];
__attribute__((used)) static volatile uint64_t after[13];
__attribute__((used, aligned(16))) static unsigned char vectors[2][16][16];

/* lseek from a call site in this program: all registers but rax, rcx and r11 are preserved, and
 * the red zone, too. */
static long seek_bare(long fd, long to)
{
	long result;
	asm volatile("push %%rbp; push %%rbx\n"
		     "mov %[to],%%rsi; mov %[fd],%%rdi\n"
		     "mov $0x1122334455667788,%%rax\n"
		     "mov %%rax,-8(%%rsp); mov %%rax,-64(%%rsp); mov %%rax,-128(%%rsp)\n"
		     "lea vectors(%%rip),%%rax\n"
		     "movdqa (%%rax),%%xmm0; movdqa 16(%%rax),%%xmm1; movdqa 112(%%rax),%%xmm7; movdqa 240(%%rax),%%xmm15\n"
		     "mov $0x10,%%rbx; mov $0x20,%%rbp; mov $0x30,%%r8; mov $0x40,%%r9; mov $0x50,%%r10\n"
		     "mov $0x60,%%r12; mov $0x70,%%r13; mov $0x80,%%r14; mov $0x90,%%r15; xor %%edx,%%edx\n"
		     "mov $8,%%eax\n"
		     "syscall\n"
		     "cmp $-4095,%%rax\n"
		     "lea after(%%rip),%%rcx\n"
		     "mov %%rbx,(%%rcx); mov %%rbp,8(%%rcx); mov %%r8,16(%%rcx); mov %%r9,24(%%rcx); mov %%r10,32(%%rcx)\n"
		     "mov %%r12,40(%%rcx); mov %%r13,48(%%rcx); mov %%r14,56(%%rcx); mov %%r15,64(%%rcx)\n"
		     "mov %%rdx,72(%%rcx); mov -8(%%rsp),%%r8; mov %%r8,80(%%rcx); mov -64(%%rsp),%%r8; mov %%r8,88(%%rcx)\n"
		     "mov -128(%%rsp),%%r8; mov %%r8,96(%%rcx)\n"
		     "lea 256+vectors(%%rip),%%rcx\n"
		     "movdqa %%xmm0,(%%rcx); movdqa %%xmm1,16(%%rcx); movdqa %%xmm7,112(%%rcx); movdqa %%xmm15,240(%%rcx)\n"
		     "pop %%rbx; pop %%rbp\n"
		     : "=a"(result)
		     : [fd] "D"(fd), [to] "S"(to)
		     : "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm7", "xmm15",
		       "memory", "cc");
	return result;
}

static void registers_are_kept(void)
{
	static const uint64_t wanted[13] = { 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0,
					     0x1122334455667788, 0x1122334455667788, 0x1122334455667788 };
	memcpy(before, wanted, sizeof before);
	int fd = open("records", O_RDONLY);
	CHECK(fd >= 0);
	char some[16];
	CHECK_IS(read(fd, some, 16), 16);
	disturb(true);
	for (int n = 0; n < 20000; n++) {
		memset(vectors[0], n, sizeof vectors[0]);
		memset(vectors[1], 0, sizeof vectors[1]);
		CHECK_IS(seek_bare(fd, n), n);
		for (int i = 0; i < 13; i++)
			CHECK_IS(after[i], before[i]);
		int kept[] = { 0, 1, 7, 15 };
		for (int i = 0; i < 4; i++)
			CHECK(memcmp(vectors[0][kept[i]], vectors[1][kept[i]], 16) == 0);
	}
	disturb(false);
	CHECK_IS(wrong, 0);
	struct timespec *volatile nowhere = NULL;
	CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, nowhere) == -1 && errno == EFAULT);
	CHECK(seek_bare(fd, -5) == -EINVAL);
	CHECK_IS(close(fd), 0);
}

static unsigned char first[6][CODE], last[6][CODE], first_vdso[4096], last_vdso[4096];

/* Copies the code at the beginning, and compares it at the end. The second time the code is read
 * through /proc/self/mem, for which the program comes home. */
static void code_is_kept(bool at_home)
{
	void *where[6] = { (void *)read, (void *)pread, (void *)lseek, (void *)write, (void *)pwrite, (void *)seek_bare };
	int fd = at_home ? open("/proc/self/mem", O_RDONLY) : -1;
	CHECK((fd >= 0) == at_home);
	for (int i = 0; i < 6; i++) {
		if (at_home)
			CHECK_IS(pread(fd, last[i], CODE, (off_t)(uintptr_t)where[i]), CODE);
		else
			memcpy(first[i], where[i], CODE);
	}
	unsigned long vdso = getauxval(AT_SYSINFO_EHDR);
	if (!at_home) {
		memcpy(first_vdso, (void *)vdso, sizeof first_vdso);
		return;
	}
	CHECK_IS(pread(fd, last_vdso, sizeof last_vdso, (off_t)vdso), sizeof last_vdso);
	CHECK(memcmp(first_vdso, last_vdso, sizeof first_vdso) == 0);
	CHECK(close(fd) == 0 && memcmp(first, last, sizeof first) == 0);
}

int main(void)
{
	struct sigaction action = { .sa_handler = on_alarm, .sa_flags = SA_RESTART };
	CHECK_IS(sigaction(SIGALRM, &action, NULL), 0);
	code_is_kept(false);
	enter_scratch();
	char *nowhere = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(nowhere != MAP_FAILED);
	make_records();
	while (going()) {
		each_is_read_once();
		each_is_written_once();
		bad_buffers(nowhere);
		registers_are_kept();
	}
	CHECK_IS(unlink("records"), 0);
	leave_scratch();
	code_is_kept(true);
	return pass();
}
