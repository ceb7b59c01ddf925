/* Proves: changes of identity and rights are in force wherever the program runs: as root, in
 * children, set*id, groups, capabilities and their effects, a root directory of its own,
 * no_new_privs; as a user, what is refused. */
#include "program.h"
#include <grp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

/* from linux/capability.h, which musl-gcc does not find */
enum { CAP_CHOWN = 0, CAP_SETUID = 7, CAP_SETPCAP = 8, CAP_SYS_TIME = 25 };
static struct { uint32_t version; int pid; } head = { 0x20080522, 0 };
typedef struct { uint32_t effective, permitted, inheritable; } caps[2];

static void as_a_user(void)
{
	uid_t r, e, s;
	CHECK_IS(setgroups(0, NULL), 0);
	CHECK_IS(setresgid(65534, 65533, 65534), 0);
	CHECK_IS(getegid(), 65533);
	CHECK_IS(setegid(65534), 0);
	CHECK_IS(setresuid(65534, 65534, 0), 0);
	CHECK(getresuid(&r, &e, &s) == 0 && r == 65534 && e == 65534 && s == 0);
	CHECK_IS(seteuid(0), 0); /* back, and for good */
	CHECK_IS(setuid(65534), 0);
	CHECK_IS(seteuid(0), -1);
	CHECK_IS(errno, EPERM);
	CHECK_IS(setgid(0), -1);
	CHECK_IS(setgroups(0, NULL), -1);
	CHECK_IS(errno, EPERM);
	CHECK_IS(chroot("/"), -1);
	CHECK_IS(errno, EPERM);
	CHECK_IS(sethostname("taken", 5), -1);
	CHECK_IS(errno, EPERM);
	CHECK(open("/proc/1/mem", O_RDONLY) < 0 && errno == EACCES);
	CHECK(access("/root/", R_OK) < 0 && errno == EACCES);
	caps none;
	CHECK_IS(syscall(SYS_capget, &head, none), 0);
	CHECK(none[0].effective == 0 && none[0].permitted == 0);
}

static void with_few_rights(void)
{
	caps have, few;
	CHECK_IS(syscall(SYS_capget, &head, have), 0);
	CHECK(have[0].effective & 1u << CAP_CHOWN);
	memset(few, 0, sizeof few);
	few[0].permitted = few[0].effective = 1u << CAP_SETUID | 1u << CAP_SETPCAP;
	CHECK_IS(prctl(PR_CAPBSET_READ, CAP_SYS_TIME), have[0].permitted >> CAP_SYS_TIME & 1);
	CHECK_IS(prctl(PR_CAPBSET_DROP, CAP_SYS_TIME), 0);
	CHECK_IS(prctl(PR_CAPBSET_READ, CAP_SYS_TIME), 0);
	CHECK_IS(syscall(SYS_capset, &head, few), 0);
	CHECK_IS(chown("theirs", 1, 1), -1);
	CHECK_IS(errno, EPERM);
	CHECK_IS(syscall(SYS_capset, &head, have), -1);
	CHECK_IS(errno, EPERM);
	CHECK_IS(prctl(PR_SET_KEEPCAPS, 1), 0);
	CHECK_IS(prctl(PR_GET_KEEPCAPS), 1);
	CHECK_IS(setuid(65534), 0);
	CHECK_IS(syscall(SYS_capget, &head, have), 0);
	CHECK(have[0].permitted == few[0].permitted && have[0].effective == 0);
	CHECK_IS(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
	CHECK_IS(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 1);
}

static void in_a_root_of_its_own(const char *root)
{
	char cwd[256];
	CHECK_IS(chroot(root), 0);
	CHECK_IS(chdir("/"), 0);
	CHECK(getcwd(cwd, sizeof cwd) != NULL && strcmp(cwd, "/") == 0);
	CHECK(access("/theirs", F_OK) == 0 && access("/proc", F_OK) < 0 && access("/../theirs", F_OK) == 0);
	int fd = open("/made", O_CREAT | O_EXCL | O_WRONLY, 0600);
	CHECK(fd >= 0 && close(fd) == 0 && unlink("/made") == 0);
}

static void child(void (*does)(void), const char *root)
{
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		for (volatile int i = 0; i < 200000; i++)
			;
		if (root)
			in_a_root_of_its_own(root);
		else
			does();
		for (volatile int i = 0; i < 200000; i++)
			;
		_exit(3);
	}
	await_exit(pid, 3);
}

int main(void)
{
	enter_scratch();
	char root[sizeof scratch];
	strcpy(root, scratch);
	CHECK_IS(chmod(".", 0711), 0);
	int fd = open("theirs", O_CREAT | O_EXCL | O_WRONLY, 0600);
	CHECK(fd >= 0 && close(fd) == 0);
	bool is_root = geteuid() == 0;
	do {
		if (is_root) {
			child(as_a_user, NULL);
			child(with_few_rights, NULL);
			child(NULL, root);
			/* the process itself, for a moment: files created meanwhile are the
			 * user's */
			CHECK_IS(setegid(65534), 0);
			CHECK_IS(seteuid(65534), 0);
			struct stat about;
			CHECK_IS(chmod("theirs", 0644), -1);
			CHECK_IS(errno, EPERM);
			fd = open("/tmp", O_TMPFILE | O_WRONLY, 0600);
			if (fd >= 0) {
				CHECK(fstat(fd, &about) == 0 && about.st_uid == 65534 && about.st_gid == 65534);
				close(fd);
			}
			CHECK_IS(seteuid(0), 0);
			CHECK_IS(setegid(0), 0);
			CHECK_IS(chmod("theirs", 0600), 0);
		} else {
			CHECK_IS(setuid(0), -1);
			CHECK_IS(errno, EPERM);
			CHECK_IS(chroot("."), -1);
			CHECK_IS(errno, EPERM);
		}
	} while (going());
	CHECK_IS(unlink("theirs"), 0);
	leave_scratch();
	return pass();
}
