/* Proves: creating, listing, renaming, linking and removing names, stat and times, also relative
 * to a directory. */
#include "program.h"
#include <dirent.h>
#include <sys/statvfs.h>

int main(void)
{
	enter_scratch();
	int here = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	CHECK(here >= 0);
	char name[64], target[64];
	do {
		for (int i = 0; i < 150; i++) {
			snprintf(name, sizeof name, "a-rather-long-name-%03d", i);
			int fd = openat(here, name, O_WRONLY | O_CREAT | O_EXCL, 0600);
			CHECK(fd >= 0);
			CHECK_IS(write(fd, name, (size_t)(i % 20)), i % 20);
			close(fd);
		}
		int count = 0;
		uint64_t sum = 0;
		DIR *list = opendir(".");
		CHECK(list != NULL);
		struct dirent *e;
		while ((e = readdir(list)))
			if (e->d_name[0] == 'a')
				count++, sum += (uint64_t)atoi(e->d_name + 19);
		closedir(list);
		CHECK_IS(count, 150);
		CHECK_IS(sum, 149 * 150 / 2);
		struct stat about;
		CHECK_IS(fstatat(here, "a-rather-long-name-019", &about, 0), 0);
		CHECK(S_ISREG(about.st_mode) && about.st_size == 19 && about.st_nlink == 1);
		CHECK_IS(link("a-rather-long-name-019", "linked"), 0);
		CHECK_IS(rename("a-rather-long-name-019", "renamed"), 0);
		CHECK_IS(stat("linked", &about), 0);
		CHECK_IS(about.st_nlink, 2);
		CHECK_IS(symlink("linked", "symbolic"), 0);
		CHECK_IS(readlink("symbolic", target, sizeof target), 6);
		CHECK(lstat("symbolic", &about) == 0 && S_ISLNK(about.st_mode));
		CHECK_IS(chmod("linked", 0640), 0);
		struct timespec times[2] = { { 1000, 5000 }, { 2000, 7000 } };
		CHECK_IS(utimensat(here, "renamed", times, 0), 0);
		CHECK_IS(stat("symbolic", &about), 0);
		CHECK((about.st_mode & 0777) == 0640 && about.st_mtim.tv_sec == 2000 && about.st_mtim.tv_nsec == 7000);
		CHECK(access("linked", R_OK | W_OK) == 0 && access("a-rather-long-name-019", F_OK) == -1);
		CHECK(unlink("linked") == 0 && unlink("symbolic") == 0 && unlink("renamed") == 0);
		for (int i = 0; i < 150; i++) {
			snprintf(name, sizeof name, "a-rather-long-name-%03d", i);
			CHECK_IS(unlinkat(here, name, 0), i == 19 ? -1 : 0);
		}
		struct statvfs system;
		CHECK(statvfs(".", &system) == 0 && system.f_bsize > 0);
	} while (going());
	close(here);
	leave_scratch();
	return pass();
}
