/* Proves: a large heap, written at random, arrives complete. 256 MiB, or TERN_HEAP_MIB. */
#include "program.h"

int main(void)
{
	size_t mib = getenv("TERN_HEAP_MIB") ? (size_t)atol(getenv("TERN_HEAP_MIB")) : 256;
	size_t words = mib << 17;
	uint64_t *heap = malloc(words * sizeof *heap), sum = 0, random = 1;
	CHECK(heap != NULL);
	for (size_t i = 0; i < words; i++) {
		/* every eighth page stays untouched */
		heap[i] = (i >> 9) % 8 == 7 ? 0 : i * 0x9e3779b97f4a7c15u;
		sum += heap[i];
	}
	say("first sum %016llx\n", (unsigned long long)sum);
	do {
		for (int i = 0; i < 200000; i++) {
			uint64_t value = next_random(&random), *at = &heap[next_random(&random) % words];
			sum += value - *at;
			*at = value;
		}
		/* blocks freed and allocated again, so that the layout of the heap changes, too */
		char *piece[32];
		for (int i = 0; i < 32; i++) {
			size_t size = 1000u << (i % 10);
			piece[i] = malloc(size);
			CHECK(piece[i] != NULL);
			memset(piece[i], i, size);
		}
		uint64_t whole = 0;
		for (size_t i = 0; i < words; i++)
			whole += heap[i];
		CHECK(whole == sum);
		for (int i = 0; i < 32; i++) {
			CHECK(piece[i][0] == i && piece[i][(1000u << (i % 10)) - 1] == i);
			free(piece[i]);
		}
	} while (going());
	free(heap);
	return pass();
}
