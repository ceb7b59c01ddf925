/* Proves: /proc/self is the process at home: its exe, its pid in stat and status, its
 * descriptors. */
#include "program.h"
#include <dirent.h>

int main(void)
{
	char exe[PATH_MAX], again[PATH_MAX], text[4096], fd_name[64];
	ssize_t length = readlink("/proc/self/exe", exe, sizeof exe - 1);
	CHECK(length > 0);
	exe[length] = 0;
	CHECK(strstr(exe, "/procself") != NULL);
	do {
		CHECK_IS(readlink("/proc/self/exe", again, sizeof again), length);
		CHECK(memcmp(exe, again, (size_t)length) == 0);
		int fd = open("/proc/self/stat", O_RDONLY);
		CHECK(fd >= 0);
		ssize_t n = read(fd, text, sizeof text - 1);
		CHECK(n > 0);
		text[n] = 0;
		int pid, ppid;
		char state;
		CHECK_IS(sscanf(text, "%d (procself) %c %d", &pid, &state, &ppid), 3);
		CHECK_IS(pid, getpid());
		CHECK_IS(ppid, getppid());
		CHECK(state == 'R' || state == 'S' || state == 'D' || state == 't');
		snprintf(fd_name, sizeof fd_name, "/proc/self/fd/%d", fd);
		CHECK((n = readlink(fd_name, again, sizeof again - 1)) > 0);
		again[n] = 0;
		CHECK(strstr(again, "/stat") != NULL);
		close(fd);
		FILE *status = fopen("/proc/self/status", "r");
		CHECK(status != NULL);
		bool named = false;
		while (fgets(text, sizeof text, status))
			named |= strcmp(text, "Name:\tprocself\n") == 0;
		fclose(status);
		CHECK(named);
		/* only the descriptors that this program has: 0 to 2, inherited ones, and the
		 * directory's */
		DIR *open_files = opendir("/proc/self/fd");
		CHECK(open_files != NULL);
		int count = 0;
		while (readdir(open_files))
			count++;
		closedir(open_files);
		static int first;
		if (!first)
			first = count;
		CHECK_IS(count, first);
	} while (going());
	return pass();
}
