/* Proves: processes that share memory move together: memory of mmap, of shm_open, of memfd_create
 * and System V, and of a file, mapped before they move and afterwards, inherited, unmapped, moved;
 * their writes are visible through descriptors; with mutexes, conditions, semaphores and futexes in
 * it on which they wait for each other; and no write of any of them is lost. */
#include "program.h"
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/shm.h>

enum { CHILDREN = 3, PAGES = 64, FAR = 200000 };

struct common {
	pthread_mutex_t mutex;
	pthread_cond_t turned;
	sem_t ask, answer;
	unsigned turn;
	unsigned long sum, parts[CHILDREN];
	_Atomic unsigned adds;
	_Atomic bool over;
};

static struct common *common;
/* One word a page, each written by the process whose turn it is. */
static uint32_t *pages, *segment, *name_less, *far, *of_file;

static void *share(int fd, size_t length)
{
	void *at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS | MAP_NORESERVE : 0), fd, 0);
	CHECK(at != MAP_FAILED);
	return at;
}

static void child(unsigned which)
{
	if (which == 0) {
		/* Replies to the parent: two semaphores, and a word in each kind of memory. */
		for (uint32_t n = 1; sem_wait(&common->ask) == 0 || errno == EINTR; n++) {
			if (common->over)
				_exit(0);
			for (int page = 0; page < PAGES; page++)
				CHECK_IS(pages[page * 1024], n * 100 + page);
			CHECK_IS(segment[5], n + 1);
			CHECK_IS(name_less[7], n + 2);
			CHECK_IS(of_file[1030], n + 4);
			of_file[1031] = n + 5;
			CHECK_IS(far[(size_t)FAR * 1024], n + 3);
			segment[5] = name_less[7] = 0;
			pages[1024 * (n % PAGES)] = n;
			sem_post(&common->answer);
		}
		fail("FAIL: sem_wait\n");
	}
	while (!common->over) {
		pthread_mutex_lock(&common->mutex);
		unsigned long sum = 0;
		for (int other = 0; other < CHILDREN; other++)
			sum += common->parts[other];
		CHECK_IS(sum, common->sum);
		common->sum++;
		common->parts[which]++;
		common->turn++;
		pthread_cond_broadcast(&common->turned);
		pthread_mutex_unlock(&common->mutex);
		atomic_fetch_add(&common->adds, 1);
		rest_ms(2);
	}
	_exit(0);
}

/* Memory that becomes shared during the run, and stops being shared. */
static void share_for_a_while(void)
{
	_Atomic uint32_t *word = share(-1, 3 * 4096);
	atomic_store(word + 2048, 7);
	pid_t helper = fork();
	CHECK(helper >= 0);
	if (helper == 0) {
		rest_ms(3);
		CHECK_IS(atomic_load(word + 2048), 7);
		atomic_store(word, 41);
		_exit(3);
	}
	await_exit(helper, 3);
	CHECK_IS(atomic_load(word), 41);
	/* Remapped elsewhere, it is the same memory. */
	_Atomic uint32_t *moved = mremap(word, 3 * 4096, 3 * 4096, MREMAP_MAYMOVE);
	CHECK(moved != MAP_FAILED);
	rest_ms(3);
	CHECK_IS(atomic_load(moved) + atomic_load(moved + 2048), 48);
	CHECK_IS(munmap(moved, 3 * 4096), 0);
}

static void round_of_words(uint32_t n)
{
	for (int page = 0; page < PAGES; page++)
		pages[page * 1024] = n * 100 + page;
	segment[5] = n + 1;
	name_less[7] = n + 2;
	of_file[1030] = n + 4;
	far[(size_t)FAR * 1024] = n + 3;
	sem_post(&common->ask);
	while (sem_wait(&common->answer) < 0)
		CHECK_IS(errno, EINTR);
	CHECK_IS(pages[1024 * (n % PAGES)], n);
	CHECK_IS(segment[5] + name_less[7], 0);
	CHECK_IS(of_file[1031], n + 5);
}

int main(void)
{
	common = share(-1, sizeof *common);
	pthread_mutexattr_t shared_mutex;
	pthread_mutexattr_init(&shared_mutex);
	pthread_mutexattr_setpshared(&shared_mutex, PTHREAD_PROCESS_SHARED);
	pthread_mutex_init(&common->mutex, &shared_mutex);
	pthread_condattr_t shared_cond;
	pthread_condattr_init(&shared_cond);
	pthread_condattr_setpshared(&shared_cond, PTHREAD_PROCESS_SHARED);
	pthread_cond_init(&common->turned, &shared_cond);
	CHECK_IS(sem_init(&common->ask, 1, 0), 0);
	CHECK_IS(sem_init(&common->answer, 1, 0), 0);

	char name[64];
	snprintf(name, sizeof name, "/tern-shared-%d", getpid());
	int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
	CHECK(fd >= 0);
	CHECK_IS(shm_unlink(name), 0);
	CHECK_IS(ftruncate(fd, PAGES * 4096), 0);
	pages = share(fd, PAGES * 4096);
	close(fd);
	int memory = memfd_create("name-less", 0);
	CHECK_IS(ftruncate(memory, 8192), 0);
	name_less = share(memory, 8192);
	int file = open(".", O_TMPFILE | O_RDWR, 0600);
	CHECK(file >= 0);
	CHECK_IS(ftruncate(file, 8000), 0);
	of_file = share(file, 8000);
	int id = shmget(IPC_PRIVATE, 4096, 0600);
	CHECK(id >= 0);
	segment = shmat(id, NULL, 0);
	CHECK(segment != (void *)-1);
	CHECK_IS(shmctl(id, IPC_RMID, NULL), 0);
	far = share(-1, (size_t)(FAR + 1) * 4096);

	pid_t children[CHILDREN];
	for (unsigned which = 0; which < CHILDREN; which++) {
		children[which] = fork();
		CHECK(children[which] >= 0);
		if (children[which] == 0)
			child(which);
	}
	uint32_t n = 0;
	do {
		unsigned before = atomic_load(&common->adds);
		round_of_words(++n);
		share_for_a_while();
		pthread_mutex_lock(&common->mutex);
		for (unsigned turn = common->turn; common->turn < turn + 4;)
			pthread_cond_wait(&common->turned, &common->mutex);
		pthread_mutex_unlock(&common->mutex);
		rest_ms(5);
		CHECK(atomic_load(&common->adds) != before);
	} while (going());
	common->over = true;
	sem_post(&common->ask);
	for (unsigned which = 0; which < CHILDREN; which++)
		await_exit(children[which], 0);
	CHECK_IS(common->parts[1] + common->parts[2], common->sum);
	/* Through a descriptor it is the same memory. */
	uint32_t word[2] = {0, 0};
	CHECK_IS(pread(file, word, 8, 1030 * 4), 8);
	CHECK_IS(word[0], n + 4);
	CHECK_IS(word[1], n + 5);
	name_less[1] = 77;
	CHECK_IS(pread(memory, word, 4, 4), 4);
	CHECK_IS(word[0], 77);
	CHECK_IS(pwrite(memory, &n, 4, 8), 4);
	CHECK_IS(name_less[2], n);
	CHECK_IS(lseek(file, 0, SEEK_END), 8000);
	return pass();
}
