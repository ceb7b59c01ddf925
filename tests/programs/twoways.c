/* Proves: one file mapped both shared and privately is one file: writes through the shared
 * mapping are in the file and in those private pages that were not written to; written pages
 * keep their content. */
#include "program.h"
#include <sys/mman.h>

enum { PAGE = 4096, PAGES = 8 };

int main(void)
{
	int file = memfd_create("twoways", MFD_CLOEXEC);
	CHECK(file >= 0);
	CHECK_IS(ftruncate(file, PAGES * PAGE), 0);
	/* one mapping above the other, wherever that is */
	char *place = mmap(NULL, 2 * PAGES * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(place != MAP_FAILED);
	char *ours = mmap(place, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file, 0);
	char *all = mmap(place + PAGES * PAGE, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
	CHECK(ours == place && all == place + PAGES * PAGE);
	memset(ours, 'p', PAGE);
	unsigned round = 0;
	do {
		round++;
		for (int page = 0; page < PAGES; page++) {
			unsigned wanted = round + (unsigned)page, found;
			memcpy(all + page * PAGE + 100, &wanted, sizeof wanted);
			CHECK_IS(pread(file, &found, sizeof found, page * PAGE + 100), sizeof found);
			CHECK_IS(found, wanted);
			memcpy(&found, ours + page * PAGE + 100, sizeof found);
			CHECK_IS(found, page ? wanted : 0x70707070);
		}
	} while (going());
	return pass();
}
