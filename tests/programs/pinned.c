/* Proves: locked memory, as used for secrets: mlock, mlock2 and munlock keep content and state;
 * locked memory is counted, and the limit binds a user without CAP_IPC_LOCK, also one who was root when
 * the limit was set. */
#include "program.h"
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>

enum { PAGE = 4096, PAGES = 8, LEN = PAGE * PAGES };

static unsigned char *map(size_t length)
{
	unsigned char *at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(at != MAP_FAILED);
	return at;
}

int main(void)
{
	struct rlimit limit = { 1 << 20, 1 << 20 };
	CHECK_IS(setrlimit(RLIMIT_MEMLOCK, &limit), 0);
	unsigned char *secret = map(LEN), *later = map(LEN);
	CHECK_IS(mlock(secret, LEN), 0);
	memset(secret, 0x77, LEN);
	/* locked when touched: MLOCK_ONFAULT */
	CHECK_IS(syscall(SYS_mlock2, later, LEN, 1), 0);
	later[PAGE] = 1;
	/* locked and never written */
	unsigned char *untouched = map(LEN);
	CHECK_IS(mlock(untouched, LEN), 0);
	/* also excluded from children: libsodium and others do both */
	CHECK_IS(madvise(secret, LEN, MADV_DONTDUMP), 0);
	bool limited = geteuid() != 0;
	uint64_t turn = 0;
	do {
		CHECK(secret[0] == 0x77 && secret[LEN - 1] == 0x77);
		CHECK(later[PAGE] == 1 && later[0] == 0 && later[LEN - 1] == 0);
		unsigned char resident[PAGES];
		CHECK_IS(mincore(untouched, LEN, resident), 0);
		for (int page = 0; page < PAGES; page++)
			CHECK(resident[page] & 1);
		unsigned char *other = map(LEN);
		CHECK_IS(mlock(other + 100, 5000), 0);
		memset(other, 3, LEN);
		/* locked memory cannot be dropped */
		CHECK_IS(madvise(other, LEN, MADV_DONTNEED), -1);
		CHECK_IS(errno, EINVAL);
		CHECK_IS(other[0], 3);
		CHECK_IS(madvise(secret, LEN, MADV_DONTNEED), -1);
		CHECK_IS(errno, EINVAL);
		CHECK_IS(munlock(other, LEN), 0);
		CHECK_IS(madvise(other, LEN, MADV_DONTNEED), 0);
		CHECK_IS(other[0], 0);
		/* a part of it unlocked and locked again */
		CHECK_IS(munlock(secret + PAGE, 2 * PAGE), 0);
		CHECK_IS(madvise(secret + PAGE, 2 * PAGE, MADV_DONTNEED), 0);
		CHECK(secret[PAGE] == 0 && secret[3 * PAGE] == 0x77);
		CHECK_IS(mlock(secret + PAGE, 2 * PAGE), 0);
		memset(secret + PAGE, 0x77, 2 * PAGE);
		/* unmapped memory */
		CHECK_IS(munmap(other + PAGE, PAGE), 0);
		CHECK_IS(mlock(other, LEN), -1);
		CHECK_IS(errno, ENOMEM);
		CHECK_IS(munlock(other, LEN), -1);
		CHECK_IS(errno, ENOMEM);
		CHECK_IS(munmap(other, LEN), 0);
		CHECK_IS(syscall(SYS_mlock2, secret, LEN, 77), -1);
		CHECK_IS(errno, EINVAL);
		CHECK_IS(getrlimit(RLIMIT_MEMLOCK, &limit), 0);
		CHECK(limit.rlim_cur == 1 << 20 && limit.rlim_max == 1 << 20);
		unsigned char *much = map(2 << 20);
		if (limited) {
			CHECK_IS(mlock(much, 2 << 20), -1);
			CHECK_IS(errno, ENOMEM);
			CHECK_IS(mlock(much, 512 << 10), 0);
			CHECK_IS(mlock(much + (1 << 20), 512 << 10), -1);
		} else {
			CHECK_IS(mlock(much, 2 << 20), 0);
		}
		CHECK_IS(munmap(much, 2 << 20), 0);
		if (!limited && turn % 8 == 0) {
			pid_t child = fork();
			CHECK(child >= 0);
			if (child == 0) {
				unsigned char *more = map(256 << 10);
				struct rlimit low = { 128 << 10, 128 << 10 };
				CHECK_IS(setrlimit(RLIMIT_MEMLOCK, &low), 0);
				CHECK_IS(mlock(more, 256 << 10), 0);
				CHECK_IS(munlock(more, 256 << 10), 0);
				CHECK_IS(setuid(65534), 0);
				CHECK_IS(mlock(more, 256 << 10), -1);
				CHECK_IS(errno, ENOMEM);
				CHECK_IS(mlock(more, 64 << 10), 0);
				_exit(6);
			}
			await_exit(child, 6);
		}
		/* a child has the memory, but not the locks */
		if (turn++ % 8 == 0) {
			pid_t child = fork();
			CHECK(child >= 0);
			if (child == 0) {
				CHECK_IS(secret[LEN - 1], 0x77);
				CHECK_IS(madvise(secret, LEN, MADV_DONTNEED), 0);
				CHECK_IS(secret[LEN - 1], 0);
				_exit(5);
			}
			await_exit(child, 5);
		}
		rest_ms(1);
	} while (going());
	CHECK_IS(munlock(secret, LEN), 0);
	CHECK_IS(madvise(secret, LEN, MADV_DONTNEED), 0);
	return pass();
}
