/* dirty MIB MB_PER_SECOND: a heap of which no two pages are alike, written at this rate, page after
 * page, until it is killed. 0: it sleeps.
 */
#include "stopwatch.h"
#include <stdint.h>

int main(int argc, char **argv)
{
	size_t pages = argc == 3 ? (size_t)atol(argv[1]) << 8 : 0;
	double each_second = argc == 3 ? atof(argv[2]) * 1e6 / 4096 : 0;
	uint64_t *heap = aligned_alloc(4096, pages << 12), word = 88172645463325252u;
	if (!pages || !heap)
		return 2;
	for (size_t i = 0; i < pages << 9; i++) {
		word ^= word << 13, word ^= word >> 7, word ^= word << 17;
		heap[i] = word;
	}
	say_pid();
	printf("ready\n");
	double begun = now();
	for (uint64_t written = 0;;) {
		uint64_t due = (uint64_t)((now() - begun) * each_second);
		/* Writes missed while it was frozen are not made up for. */
		if (due > written + (uint64_t)(each_second / 10))
			begun = now() - (double)written / each_second;
		else
			for (; written < due; written++)
				heap[written % pages << 9]++;
		nanosleep(&(struct timespec){ 0, each_second > 0 ? 2000000 : 100000000 }, NULL);
	}
}
