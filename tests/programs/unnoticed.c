/* Proves: moves leave no trace at mapped files: a lease stays, and inotify reports nothing. The
 * content is right nevertheless: of a file that is mapped whole and closed, of one that is mapped
 * in part and written there, and of a leased one. */
#include "program.h"
#include <sys/inotify.h>
#include <sys/mman.h>

enum { PAGE = 4096 };

static volatile sig_atomic_t broken;
static void on_break(int signal)
{
	(void)signal;
	broken++;
}

static int make(const char *name)
{
	char block[PAGE];
	int fd = open(name, O_CREAT | O_RDWR | O_EXCL, 0600);
	CHECK(fd >= 0);
	for (int page = 0; page < 3; page++) {
		memset(block, 'a' + page, PAGE);
		CHECK_IS(write(fd, block, PAGE - (page == 2)), PAGE - (page == 2));
	}
	return fd;
}

static char *map(int fd, int pages, int prot, int from)
{
	char *at = mmap(NULL, (size_t)pages * PAGE, prot, MAP_PRIVATE, fd, (off_t)from * PAGE);
	CHECK(at != MAP_FAILED);
	return at;
}

int main(void)
{
	CHECK(signal(SIGIO, on_break) != SIG_ERR);
	enter_scratch();
	int leased = make("leased"), part = make("part"), whole = make("whole");
	char *of_leased = map(leased, 3, PROT_READ, 0);
	char *of_leased_part = map(leased, 1, PROT_READ | PROT_WRITE, 2);
	char *of_part = map(part, 1, PROT_READ | PROT_WRITE, 1);
	char *of_whole = map(whole, 3, PROT_READ, 0);
	CHECK_IS(close(whole), 0);
	CHECK_IS(fcntl(leased, F_SETLEASE, F_WRLCK), 0);
	int events = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
	CHECK(events >= 0);
	CHECK(inotify_add_watch(events, "part", IN_ALL_EVENTS) > 0);
	CHECK(inotify_add_watch(events, "whole", IN_ALL_EVENTS) > 0);
	of_part[0] = 'z';
	do {
		struct inotify_event event;
		char space[sizeof event + NAME_MAX + 1];
		if (read(events, space, sizeof space) > 0) {
			memcpy(&event, space, sizeof event);
			fail("event %x of file %d\n", event.mask, event.wd);
		}
		CHECK_IS(errno, EAGAIN);
		CHECK_IS(fcntl(leased, F_GETLEASE), F_WRLCK);
		CHECK_IS(broken, 0);
		CHECK(of_leased[0] == 'a' && of_leased[3 * PAGE - 2] == 'c' && of_leased[3 * PAGE - 1] == 0);
		CHECK(of_whole[0] == 'a' && of_whole[3 * PAGE - 2] == 'c' && of_whole[3 * PAGE - 1] == 0);
		CHECK_IS(of_leased_part[0], 'c');
		CHECK(of_part[0] == 'z' && of_part[1] == 'b');
		/* dropped: the file's content again */
		CHECK_IS(madvise(of_part, PAGE, MADV_DONTNEED), 0);
		CHECK_IS(of_part[0], 'b');
		of_part[0] = 'z';
	} while (going());
	CHECK_IS(close(leased), 0);
	CHECK(unlink("leased") == 0 && unlink("part") == 0 && unlink("whole") == 0);
	leave_scratch();
	return pass();
}
