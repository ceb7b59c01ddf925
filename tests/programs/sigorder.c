/* Proves: a signal that a thread sends to its process or to another thread is delivered before
 * the target can learn of it in another way: a thread that is woken after the signal has handled
 * it. */
#include "program.h"
#include <pthread.h>
#include <semaphore.h>

static sem_t wanted, sent;
static volatile sig_atomic_t handled[2];
static volatile bool over, by_thread;
static pthread_t first;

static void handler(int signal)
{
	handled[signal == SIGUSR2]++;
}

static void wait_for(sem_t *semaphore)
{
	while (sem_wait(semaphore) < 0)
		CHECK_IS(errno, EINTR);
}

static void *sender(void *unused)
{
	(void)unused;
	for (wait_for(&wanted); !over; wait_for(&wanted)) {
		for (int i = 0; i < 2; i++) {
			int signal = i ? SIGUSR2 : SIGUSR1;
			CHECK_IS(by_thread ? pthread_kill(first, signal) : kill(getpid(), signal), 0);
		}
		sem_post(&sent);
	}
	return NULL;
}

int main(void)
{
	struct sigaction action = { .sa_handler = handler };
	sigset_t both, none;
	pthread_t thread;
	first = pthread_self();
	CHECK_IS(sem_init(&wanted, 0, 0) | sem_init(&sent, 0, 0), 0);
	CHECK_IS(sigaction(SIGUSR1, &action, NULL) | sigaction(SIGUSR2, &action, NULL), 0);
	/* Only the first thread can take them. */
	sigemptyset(&both);
	sigaddset(&both, SIGUSR1);
	sigaddset(&both, SIGUSR2);
	CHECK_IS(pthread_sigmask(SIG_BLOCK, &both, &none), 0);
	CHECK_IS(pthread_create(&thread, NULL, sender, NULL), 0);
	CHECK_IS(pthread_sigmask(SIG_SETMASK, &none, NULL), 0);
	for (int rounds = 1; going(); rounds++) {
		by_thread = rounds & 1;
		sem_post(&wanted);
		wait_for(&sent);
		CHECK_IS(handled[0], rounds);
		CHECK_IS(handled[1], rounds);
	}
	over = true;
	sem_post(&wanted);
	CHECK_IS(pthread_join(thread, NULL), 0);
	return pass();
}
