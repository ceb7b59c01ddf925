/* Proves: a handler on its own stack (sigaltstack) that computes there long enough to be moved, and
 * returns; also a second signal on top of the first. */
#include "program.h"

static _Alignas(16) char stack[128 * 1024];
static volatile sig_atomic_t depth, deepest, handled;

static bool on_stack(const void *p) { return (const char *)p >= stack && (const char *)p < stack + sizeof stack; }

static void on(int signal)
{
	volatile uint64_t pattern[2000];
	depth++;
	if (depth > deepest)
		deepest = depth;
	CHECK(on_stack((const void *)pattern));
	stack_t about;
	CHECK_IS(sigaltstack(NULL, &about), 0);
	CHECK(about.ss_flags == SS_ONSTACK && about.ss_sp == stack);
	about.ss_flags = 0;
	CHECK_IS(sigaltstack(&about, NULL), -1);
	CHECK_IS(errno, EPERM);
	for (uint64_t i = 0; i < 2000; i++)
		pattern[i] = i * 77 + (uint64_t)signal;
	if (signal == SIGUSR1)
		raise(SIGUSR2);
	for (volatile int spin = 0; spin < 4000000; spin++)
		;
	for (uint64_t i = 0; i < 2000; i++)
		CHECK(pattern[i] == i * 77 + (uint64_t)signal);
	handled++;
	depth--;
}

int main(void)
{
	stack_t own = { .ss_sp = stack, .ss_size = sizeof stack };
	CHECK_IS(sigaltstack(&own, NULL), 0);
	struct sigaction action = { .sa_handler = on, .sa_flags = SA_ONSTACK };
	CHECK_IS(sigaction(SIGUSR1, &action, NULL), 0);
	CHECK_IS(sigaction(SIGUSR2, &action, NULL), 0);
	do {
		double kept = 1.25;
		uint64_t mark = 0x1122334455667788u;
		handled = deepest = 0;
		raise(SIGUSR1);
		CHECK_IS(handled, 2);
		CHECK_IS(deepest, 2);
		CHECK(kept * 4 == 5 && mark == 0x1122334455667788u);
		stack_t about;
		CHECK_IS(sigaltstack(NULL, &about), 0);
		CHECK(about.ss_flags == 0 && about.ss_sp == stack && about.ss_size == sizeof stack);
	} while (going());
	return pass();
}
