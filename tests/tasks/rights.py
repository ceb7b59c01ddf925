"""Permissions in a directory of root's: files with all kinds of modes, accessed by all kinds of callers."""
import errno
import os
import stat
import sys

OWNER, GROUP, OTHER = 1234, 4321, 999
CALLERS = {
    "root": (0, 0, []),
    "owner": (OWNER, OWNER, []),
    "group": (OTHER, GROUP, []),
    "further group": (OTHER, OTHER, [77, GROUP]),
    "other": (OTHER, OTHER, [77]),
}
os.chdir(sys.argv[1])
os.umask(0)


def attempt(call, *arguments):
    try:
        result = call(*arguments)
        if call is os.open:
            os.close(result)
        return "yes"
    except OSError as error:
        return errno.errorcode[error.errno]


def owned(name, mode):
    os.chown(name, OWNER, GROUP)
    os.chmod(name, mode)


for mode in (0o000, 0o400, 0o200, 0o600, 0o040, 0o060, 0o004, 0o006, 0o640, 0o664, 0o070, 0o777):
    with open(f"f{mode:03o}", "w") as file:
        file.write("text")
    owned(f"f{mode:03o}", mode)
for mode in (0o700, 0o500, 0o100, 0o300, 0o070, 0o050, 0o007, 0o005, 0o001, 0o1777, 0o2777, 0o755):
    name = f"d{mode:04o}"
    os.mkdir(name)
    for inside in ("theirs", "rooted"):
        with open(f"{name}/{inside}", "w") as file:
            file.write("text")
    os.chown(f"{name}/theirs", OWNER, GROUP)
    owned(name, mode)
for who, (uid, gid, groups) in CALLERS.items():
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        continue
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    for name in sorted(os.listdir(".")):
        if name[0] == "f":
            tried = [attempt(os.open, name, flags) for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_TRUNC)]
            tried += [attempt(os.chmod, name, stat.S_IMODE(os.stat(name).st_mode)), attempt(os.chown, name, -1, GROUP),
                      attempt(os.chown, name, 5, -1), attempt(os.utime, name), attempt(os.truncate, name, 3)]
        else:
            tried = [attempt(os.listdir, name), attempt(os.stat, name + "/theirs"),
                     attempt(os.open, name + "/theirs", os.O_RDONLY), attempt(os.open, name + "/rooted", os.O_WRONLY),
                     attempt(os.mkdir, name + "/new"), attempt(os.rename, name + "/rooted", name + "/moved"),
                     attempt(os.rename, name + "/moved", name + "/rooted"), attempt(os.rmdir, name + "/new"),
                     attempt(os.chdir, name) == "yes" and os.chdir("..")]
        print(who, name, *tried)
    if attempt(os.open, "d2777/made", os.O_CREAT | os.O_WRONLY) == "yes":
        made = os.stat("d2777/made")
        print(who, "made", made.st_uid, made.st_gid, stat.filemode(made.st_mode))
        os.unlink("d2777/made")
    sys.stdout.flush()
    os._exit(0)
