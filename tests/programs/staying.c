/* Proves: a process that cannot be moved is refused with a reason and continues undisturbed, and comes home for the call
 * that makes it so. The argument selects the reason. */
#include "program.h"
#include <linux/filter.h>
#include <linux/perf_event.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/shm.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>

enum { PAGE = 4096 };
static char stack[64 << 10];
static pid_t child;
static int leased = -1;

/* A thread that is not the first restricts itself, reports that, and waits for a byte or the end of the pipe. */
static int thread_waits[2], thread_reports[2];
static int thread_waits_for_file, thread_is_strict, thread_has_personality;

static void *restricted(void *nothing)
{
	struct sock_filter instructions[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_munmap, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mincore, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EBADSLT),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog filter = { sizeof instructions / sizeof *instructions, instructions };
	char file[256], byte = 'f';
	(void)nothing;
	snprintf(file, sizeof file, "%s.filter", getenv("TERN_UNTIL"));
	while (thread_waits_for_file && access(file, F_OK) != 0)
		;
	if (thread_has_personality) {
		CHECK_IS(personality(ADDR_NO_RANDOMIZE), 0);
	} else if (thread_is_strict) {
		CHECK_IS(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT), 0);
	} else {
		CHECK_IS(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
		CHECK_IS(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter), 0);
	}
	CHECK_IS(write(thread_reports[1], &byte, 1), 1);
	if (thread_waits_for_file)
		CHECK_IS(write(2, "filtered\n", 9), 9);
	CHECK_IS(read(thread_waits[0], &byte, 1), 0);
	if (thread_has_personality)
		CHECK_IS(personality(0xffffffff), ADDR_NO_RANDOMIZE);
	else if (!thread_is_strict) {
		CHECK_IS(syscall(SYS_mincore, 0, 0, 0), -1);
		CHECK_IS(errno, EBADSLT);
	}
	CHECK_IS(write(thread_reports[1], &byte, 1), 1);
	syscall(SYS_exit, 0); /* the C library would unmap memory */
	return NULL;
}

static void end_restricted(void)
{
	char byte;
	if (thread_reports[1] == 0)
		return;
	close(thread_waits[1]);
	CHECK_IS(read(thread_reports[0], &byte, 1), 1);
}

static void start_restricted(void)
{
	pthread_t thread;
	char byte;
	CHECK_IS(pipe(thread_waits), 0);
	CHECK_IS(pipe(thread_reports), 0);
	CHECK_IS(pthread_create(&thread, NULL, restricted, NULL), 0);
	if (!thread_waits_for_file)
		CHECK_IS(read(thread_reports[0], &byte, 1), 1);
}

static void go_on(void)
{
	say("held\n");
	do
		rest_ms(20);
	while (going());
	end_restricted();
	if (child > 0)
		kill(child, SIGKILL);
	if (leased >= 0)
		CHECK_IS(fcntl(leased, F_GETLEASE), F_WRLCK);
}

static int sleeper(void *nothing)
{
	(void)nothing;
	for (;;)
		syscall(SYS_pause);
	return 0;
}

static int uffd(void *at)
{
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
	CHECK(fd >= 0);
	struct uffdio_api api = { .api = UFFD_API };
	CHECK_IS(ioctl(fd, UFFDIO_API, &api), 0);
	struct uffdio_register all = { .range = { (uintptr_t)at, PAGE }, .mode = UFFDIO_REGISTER_MODE_MISSING };
	CHECK_IS(ioctl(fd, UFFDIO_REGISTER, &all), 0);
	return fd;
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	const int kind = MAP_PRIVATE | MAP_ANONYMOUS;
	void *at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, kind, -1, 0);
	CHECK(at != MAP_FAILED);
	static char parameters[256];
	if (strcmp(what, "seccomp") == 0) {
		struct sock_filter allow = { BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW };
		struct sock_fprog filter = { 1, &allow };
		CHECK_IS(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
		CHECK_IS(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), 0);
	} else if (strncmp(what, "thread ", 7) == 0) {
		thread_is_strict = strcmp(what, "thread strict") == 0;
		thread_has_personality = strcmp(what, "thread personality") == 0;
		thread_waits_for_file = strcmp(what, "thread filter later") == 0;
		start_restricted();
	} else if (strcmp(what, "traced") == 0) {
		int told[2];
		CHECK_IS(pipe(told), 0);
		if ((child = fork()) == 0) {
			CHECK_IS(ptrace(PTRACE_SEIZE, getppid(), 0, 0), 0);
			CHECK_IS(write(told[1], "t", 1), 1);
			for (;;)
				pause();
		}
		char byte;
		close(told[1]);
		CHECK_IS(read(told[0], &byte, 1), 1);
		close(told[0]);
	} else if (strcmp(what, "shared") == 0) {
		child = clone(sleeper, stack + sizeof stack, CLONE_VM | SIGCHLD, NULL);
		CHECK(child > 0);
	} else if (strcmp(what, "ring") == 0) {
		CHECK(syscall(SYS_io_uring_setup, 4, parameters) >= 0);
	} else if (strcmp(what, "perf") == 0) {
		struct perf_event_attr event = { .type = PERF_TYPE_SOFTWARE, .size = sizeof event, .exclude_kernel = 1 };
		event.config = PERF_COUNT_SW_TASK_CLOCK;
		CHECK(syscall(SYS_perf_event_open, &event, 0, -1, -1, 0) >= 0);
	} else if (strcmp(what, "uffd") == 0) {
		CHECK(uffd(at) >= 0);
	} else if (strcmp(what, "uffd elsewhere") == 0) {
		int fd = uffd(at); /* only a child has the descriptor */
		if ((child = fork()) == 0)
			sleeper(NULL);
		close(fd);
	} else if (strcmp(what, "aio") == 0) {
		unsigned long context = 0;
		CHECK_IS(syscall(SYS_io_setup, 4, &context), 0);
	} else if (strcmp(what, "secret") == 0) {
		int fd = (int)syscall(SYS_memfd_secret, 0);
		CHECK(fd >= 0 && ftruncate(fd, PAGE) == 0);
		CHECK(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED);
	} else if (strcmp(what, "huge") == 0) {
		/* reserving needs no free huge page */
		CHECK(mmap(NULL, 2 << 20, PROT_READ | PROT_WRITE, kind | MAP_HUGETLB | MAP_NORESERVE, -1, 0) != MAP_FAILED);
	} else if (strcmp(what, "sealed") == 0) {
		CHECK_IS(syscall(462, at, PAGE, 0), 0); /* mseal */
		CHECK(munmap(at, PAGE) == -1 && errno == EPERM);
	} else if (strcmp(what, "tsc") == 0) {
		CHECK_IS(prctl(PR_SET_TSC, PR_TSC_SIGSEGV, 0, 0, 0), 0);
		say("held\n"); /* from now on it may not read a clock */
		while (access(getenv("TERN_UNTIL"), F_OK) != 0)
			;
		return pass();
	} else if (strcmp(what, "mdwe") == 0) {
		CHECK_IS(prctl(65, 1, 0, 0, 0), 0); /* PR_SET_MDWE */
	} else if (strcmp(what, "dispatch") == 0) {
		static char selector; /* the kernel makes all calls */
		CHECK_IS(prctl(59, 1, 0, 0, &selector), 0); /* PR_SET_SYSCALL_USER_DISPATCH */
	} else if (strcmp(what, "large") == 0) {
		/* more than the machine has, in pieces that the kernel joins; then shared memory */
		struct sysinfo info;
		CHECK_IS(sysinfo(&info), 0);
		size_t all = (info.totalram + info.totalswap) * info.mem_unit, piece = 1ul << 28;
		for (size_t mapped = 0; mapped <= all; mapped += piece)
			CHECK(mmap(NULL, piece, PROT_READ | PROT_WRITE, kind, -1, 0) != MAP_FAILED);
		int segment = shmget(IPC_PRIVATE, PAGE, 0600);
		CHECK(segment >= 0);
		CHECK(shmat(segment, NULL, 0) != (void *)-1);
		CHECK_IS(shmctl(segment, IPC_RMID, NULL), 0);
	} else if (strcmp(what, "leased") == 0 || strcmp(what, "leased shared") == 0) {
		int shared = strcmp(what, "leased shared") == 0;
		char name[] = "/tmp/leasedXXXXXX";
		leased = mkstemp(name);
		CHECK(leased >= 0 && unlink(name) == 0 && ftruncate(leased, PAGE) == 0);
		int access = shared ? PROT_READ | PROT_WRITE : PROT_READ;
		CHECK(mmap(NULL, PAGE, access, shared ? MAP_SHARED : MAP_PRIVATE, leased, 0) != MAP_FAILED);
		CHECK_IS(fcntl(leased, F_SETLEASE, F_WRLCK), 0); /* SIGIO kills if it is broken */
	} else if (strcmp(what, "device") == 0) {
		int fd = open("/dev/loop0", O_RDONLY);
		CHECK(fd >= 0 && mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 0) != MAP_FAILED);
	} else if (strcmp(what, "vdso") == 0) {
		unsigned long start[8], end[8];
		char line[256];
		int count = 0;
		FILE *maps = fopen("/proc/self/maps", "r");
		while (count < 8 && fgets(line, sizeof line, maps))
			if (strstr(line, "[vdso]") || strstr(line, "[vvar"))
				count += sscanf(line, "%lx-%lx", &start[count], &end[count]) == 2;
		fclose(maps);
		CHECK(count > 0);
		while (count-- > 0)
			CHECK_IS(munmap((void *)start[count], end[count] - start[count]), 0);
		/* the C library would read the clock by the vDSO */
		const char *until = getenv("TERN_UNTIL");
		struct timespec moment = { 0, 20000000 };
		say("held\n");
		while (until && access(until, F_OK) != 0)
			syscall(SYS_nanosleep, &moment, NULL);
		return pass();
	} else if (strcmp(what, "zombie") == 0) {
		if ((child = fork()) == 0)
			_exit(0);
		siginfo_t info;
		CHECK_IS(waitid(P_PID, (id_t)child, &info, WEXITED | WNOWAIT), 0);
	}
	go_on();
	return pass();
}
