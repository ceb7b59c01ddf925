/* Proves: getrandom and the AT_RANDOM bytes never repeat, also after a fork and a move. */
#include "program.h"
#include <sys/auxv.h>
#include <sys/random.h>

int main(void)
{
	uint64_t last = 0, value = 0, at_start[2], at_end[2];
	CHECK(getauxval(AT_RANDOM) != 0);
	memcpy(at_start, (void *)getauxval(AT_RANDOM), sizeof at_start);
	unsigned long page = getauxval(AT_PAGESZ);
	do {
		for (int i = 0; i < 500; i++, last = value) {
			CHECK_IS(getrandom(&value, sizeof value, 0), sizeof value);
			CHECK(value != last);
		}
		unsigned char many[4096] = { 0 };
		CHECK_IS(getrandom(many, sizeof many, GRND_NONBLOCK), sizeof many);
		int ones = 0;
		for (size_t i = 0; i < sizeof many; i++)
			ones += __builtin_popcount(many[i]);
		CHECK(ones > 15000 && ones < 17800);
		int ends[2];
		uint64_t childs;
		CHECK_IS(pipe(ends), 0);
		pid_t child = fork();
		CHECK(child >= 0);
		CHECK_IS(getrandom(&value, sizeof value, 0), sizeof value);
		if (child == 0)
			_exit(write(ends[1], &value, sizeof value) == sizeof value ? 0 : 1);
		CHECK_IS(read(ends[0], &childs, sizeof childs), sizeof childs);
		CHECK(childs != value);
		close(ends[0]), close(ends[1]);
		await_exit(child, 0);
	} while (going());
	memcpy(at_end, (void *)getauxval(AT_RANDOM), sizeof at_end);
	CHECK(memcmp(at_start, at_end, sizeof at_start) == 0);
	CHECK_IS(getauxval(AT_PAGESZ), page);
	return pass();
}
