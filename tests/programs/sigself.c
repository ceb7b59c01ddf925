/* Proves: kill, raise and sigqueue to itself are delivered before the call returns; masks during
 * handlers, SA_NODEFER, SA_RESETHAND, and jumps out of handlers. */
#include "program.h"
#include <setjmp.h>

static volatile sig_atomic_t seen, nested, most;
static sigjmp_buf way_out;

static void nest(int signal)
{
	nested++;
	most = nested > most ? nested : most;
	seen++;
	if (seen < 3)
		raise(signal);
	nested--;
}
static void note(int signal, siginfo_t *info, void *context)
{
	(void)signal, (void)context;
	CHECK_IS(info->si_pid, getpid());
	CHECK_IS(info->si_uid, getuid());
	seen++;
}
static void leave(int signal) { siglongjmp(way_out, signal); }

static void set(int signal, void (*handler)(int), int flags)
{
	struct sigaction action = { .sa_handler = handler, .sa_flags = flags };
	CHECK_IS(sigaction(signal, &action, NULL), 0);
}

int main(void)
{
	do {
		seen = most = 0;
		set(SIGUSR1, nest, 0); /* blocked while it runs: one after the other */
		raise(SIGUSR1);
		CHECK_IS(seen, 3);
		CHECK_IS(most, 1);
		seen = most = 0;
		set(SIGUSR1, nest, SA_NODEFER); /* nested */
		kill(getpid(), SIGUSR1);
		CHECK_IS(seen, 3);
		CHECK_IS(most, 3);

		seen = 0;
		struct sigaction action = { .sa_sigaction = note, .sa_flags = SA_SIGINFO | (int)SA_RESETHAND };
		CHECK_IS(sigaction(SIGUSR2, &action, NULL), 0);
		CHECK_IS(kill(getpid(), SIGUSR2), 0);
		CHECK_IS(seen, 1);
		CHECK(sigaction(SIGUSR2, NULL, &action) == 0 && action.sa_handler == SIG_DFL);

		set(SIGUSR2, leave, 0);
		int came = sigsetjmp(way_out, 1);
		if (came == 0) {
			raise(SIGUSR2);
			fail("FAIL: the handler did not leave\n");
		}
		CHECK_IS(came, SIGUSR2);
		sigset_t mask;
		CHECK_IS(sigprocmask(SIG_BLOCK, NULL, &mask), 0);
		CHECK(!sigismember(&mask, SIGUSR2));

		/* set the default action, then a handler, then the default again: sigaction
		 * returns the previous one each time */
		set(SIGTERM, SIG_DFL, SA_RESTART);
		CHECK(sigaction(SIGTERM, NULL, &action) == 0 && action.sa_handler == SIG_DFL);
		CHECK(action.sa_flags & SA_RESTART);
		seen = 0;
		set(SIGTERM, nest, 0);
		raise(SIGTERM);
		CHECK_IS(seen, 3);
		set(SIGTERM, SIG_DFL, 0), set(SIGTERM, SIG_DFL, SA_NODEFER);
		pid_t child = fork();
		if (child == 0)
			raise(SIGTERM), _exit(0);
		int status;
		CHECK_IS(waitpid(child, &status, 0), child);
		CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);

		/* ignored and default-ignored signals do nothing, not even interrupt */
		signal(SIGURG, SIG_DFL), signal(SIGUSR1, SIG_IGN);
		raise(SIGURG), raise(SIGUSR1), raise(SIGCONT);
	} while (going());
	return pass();
}
