/* Tries: to overwrite its own deputy, code or mailbox, through /proc/self/mem, which home opens
 * for it. */
#include "hostile.h"

static unsigned char junk[RANGE];

int main(int argc, char **argv)
{
	CHECK_IS(argc, 3);
	uint64_t random = 11;
	bool ones = strcmp(argv[2], "ones") == 0;
	for (size_t i = 0; i < sizeof junk; i++)
		junk[i] = ones ? 0xff : (unsigned char)next_random(&random);
	ready();
	uintptr_t range = find_range(argv[1]);
	int fd = open("/proc/self/mem", O_RDWR);
	if (fd < 0) {
		say("not opened\n");
	} else if (strcmp(argv[2], "code") == 0) {
		say("wrote %d\n", (int)pwrite(fd, junk, PAGE, (off_t)range));
	} else {
		for (int turn = 0; turn < 50; turn++)
			for (uintptr_t page = range + PAGE; page < range + RANGE; page += PAGE)
				pwrite(fd, junk + (size_t)turn * 8, PAGE, (off_t)page);
	}
	done();
	return pass();
}
