/* Proves: memory that grows by itself: the stack up to its limit and no further, any number of
 * times; a mapping that grows down (MAP_GROWSDOWN) to that limit; and a heap that only grows,
 * whose old content stays. */
#include "program.h"
#include <setjmp.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>

enum { PAGE = 4096, STACK = 2 << 20 };

static sigjmp_buf way_out;
static char *volatile lowest;
static char own_stack[64 << 10];

static void on(int signal) { siglongjmp(way_out, signal); }

__attribute__((noinline)) static int deeper(int level)
{
	volatile char frame[16 << 10];
	frame[0] = (char)level, frame[sizeof frame - 1] = (char)level;
	lowest = (char *)frame;
	int below = level ? deeper(level - 1) : 0;
	CHECK(frame[0] == (char)level && frame[sizeof frame - 1] == (char)level);
	return below + 1;
}

int main(int argc, char **argv)
{
	(void)argc;
	struct rlimit limit = { STACK, STACK };
	if (!getenv("TERN_GROWTH")) { /* a stack limit takes effect at execve, where the layout is chosen */
		CHECK_IS(setrlimit(RLIMIT_STACK, &limit), 0);
		CHECK_IS(setenv("TERN_GROWTH", "1", 1), 0);
		execv("/proc/self/exe", argv);
		fail("no execve\n");
	}
	stack_t stack = { .ss_sp = own_stack, .ss_size = sizeof own_stack };
	CHECK_IS(sigaltstack(&stack, NULL), 0);
	struct sigaction action = { .sa_handler = on, .sa_flags = SA_ONSTACK };
	CHECK_IS(sigaction(SIGSEGV, &action, NULL), 0);
	char *here = (char *)__builtin_frame_address(0);
	char *heap = (char *)syscall(SYS_brk, NULL), *end = heap;
	size_t grown = 0;
	uint64_t turn = 0;
	do {
		/* 1.5 MiB are within the limit, and 2.5 are not */
		CHECK_IS(deeper(95), 96);
		CHECK(here - lowest > 3 << 19);
		int came = sigsetjmp(way_out, 1);
		if (came == 0)
			deeper(160);
		CHECK_IS(came, SIGSEGV);
		CHECK(here - lowest > STACK - (256 << 10) && here - lowest < STACK + (64 << 10));

		/* growing down, a page at a time and in leaps, up to the limit */
		char *room = mmap(NULL, 600 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		CHECK(room != MAP_FAILED);
		CHECK_IS(munmap(room + PAGE, 599 * PAGE), 0);
		char *top = mmap(room + 599 * PAGE, PAGE, PROT_READ | PROT_WRITE,
				 MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN | MAP_FIXED, -1, 0);
		CHECK(top == room + 599 * PAGE);
		for (int i = 0; i < 200; i++)
			top[-i * PAGE] = (char)i;
		rest_ms(2);
		for (int i = 0; i < 200; i++)
			CHECK_IS(top[-i * PAGE], (char)i);
		/* the stack limit is also the limit of this mapping */
		came = sigsetjmp(way_out, 1);
		if (came == 0)
			*(volatile char *)(room + 2 * PAGE) = 1;
		CHECK_IS(came, SIGSEGV);
		CHECK_IS(munmap(room, 600 * PAGE), 0);

		/* the heap grows, and is reset from time to time */
		if (grown > 8 << 20) {
			CHECK((char *)syscall(SYS_brk, heap) == heap);
			end = heap, grown = 0;
		}
		CHECK((char *)syscall(SYS_brk, end + 12345) == end + 12345);
		memset(end, (int)(++turn & 0x7f), 12345);
		end += 12345, grown += 12345;
		size_t number = grown / 12345;
		for (size_t i = 0; i < number; i++) {
			const char *block = heap + i * 12345;
			int wanted = (int)((turn - (number - 1 - i)) & 0x7f);
			CHECK(block[0] == wanted && block[6000] == wanted && block[12344] == wanted);
		}
		/* the break cannot pass another mapping: it is returned unchanged */
		CHECK((char *)syscall(SYS_brk, (char *)(0x7ULL << 44)) == end);
		CHECK((char *)syscall(SYS_brk, (char *)8) == end);
	} while (going());
	return pass();
}
