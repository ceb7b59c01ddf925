//! Files by name: opening, metadata, directories, extended attributes, handles.

use super::vocabulary::*;
use Interrupted::Restarts;

const NO_TIMEOUT: Timeout = Timeout::None;
const STAT: Shape = output(size::<libc::stat>());
const STATFS: Shape = output(size::<libc::statfs>());
const VALUES: &str = "Extended attributes are the file's, at home.";
/// The kernel itself lowers a longer buffer to this (XATTR_SIZE_MAX, XATTR_LIST_MAX).
const fn attribute_out(arg: u8) -> Shape {
    filled(counted(arg, Width::Size, 1, 65536, OverLimit::Cut), 1)
}
const fn attribute_in(arg: u8) -> Shape {
    struct_in(arg, Width::Size, 65536)
}
const fn link_out(arg: u8) -> Shape {
    filled(counted(arg, Width::Int, 1, 65536, OverLimit::Cut), 1)
}
const fn entries_out(arg: u8) -> Shape {
    let len = counted(arg, Width::UInt, 1, limits::MAX_DATA, OverLimit::Cut);
    Shape::Out(len, Amount::Padded, When::AtLeast(0))
}
/// struct file_handle: eight bytes, then as many bytes as its first number states.
const HANDLE: Len = Len::Embedded(EmbeddedLen { at: 0, unit: 1, add: 8, zero: 0, max: 136, beyond: 8 });

/// AT_HANDLE_MNT_ID_UNIQUE makes the mount id a 64-bit number.
fn mount_id(args: &[u64; 6]) -> u32 {
    if args[4] & 1 == 0 { 4 } else { 8 }
}

rows! {
    2 open HOME [PATH, V, V] {waits(Restarts, NO_TIMEOUT)} NAMES;
    4 stat HOME [PATH, STAT] {} NAMES;
    5 fstat HOME [FD, STAT] {} AT_THE_DEPUTY;
    6 lstat HOME [PATH, STAT] {} NAMES;
    21 access HOME [PATH, V] {} NAMES;
    76 truncate HOME [PATH, V] {} NAMES;
    78 getdents HOME [FD, entries_out(2), V] {consumes()} "The directory's offset is the deputy's.";
    79 getcwd HOME [filled(counted(1, Width::Size, 1, 65536, OverLimit::Cut), 1), V] {}
        "The working directory is the deputy's.";
    80 chdir HOME [PATH] {} "The working directory is the deputy's.";
    81 fchdir HOME [FD] {} "The working directory is the deputy's.";
    82 rename HOME [PATH, PATH] {} NAMES;
    83 mkdir HOME [PATH, V] {} NAMES;
    84 rmdir HOME [PATH] {} NAMES;
    85 creat HOME [PATH, V] {waits(Restarts, NO_TIMEOUT)} NAMES;
    86 link HOME [PATH, PATH] {} NAMES;
    87 unlink HOME [PATH] {} NAMES;
    88 symlink HOME [PATH, PATH] {} NAMES;
    89 readlink HOME [PATH, link_out(2), V] {} NAMES;
    90 chmod HOME [PATH, V] {} NAMES;
    91 fchmod HOME [FD, V] {} AT_THE_DEPUTY;
    92 chown HOME [PATH, V, V] {} NAMES;
    93 fchown HOME [FD, V, V] {} AT_THE_DEPUTY;
    94 lchown HOME [PATH, V, V] {} NAMES;
    95 umask HOME [V] {} "The file creation mask is the deputy's, since it creates the files.";
    132 utime HOME [PATH, input(PAIR)] {} NAMES;
    133 mknod HOME [PATH, V, V] {} NAMES;
    136 ustat HOME [V, output(32)] {} "The file systems are home's.";
    137 statfs HOME [PATH, STATFS] {} NAMES;
    138 fstatfs HOME [FD, STATFS] {} AT_THE_DEPUTY;
    161 chroot HOME [PATH] {} "The root directory is the deputy's.";
    188 setxattr HOME [PATH, ATTRIBUTE, attribute_in(3), V, V] {} VALUES;
    189 lsetxattr HOME [PATH, ATTRIBUTE, attribute_in(3), V, V] {} VALUES;
    190 fsetxattr HOME [FD, ATTRIBUTE, attribute_in(3), V, V] {} VALUES;
    191 getxattr HOME [PATH, ATTRIBUTE, attribute_out(3), V] {} VALUES;
    192 lgetxattr HOME [PATH, ATTRIBUTE, attribute_out(3), V] {} VALUES;
    193 fgetxattr HOME [FD, ATTRIBUTE, attribute_out(3), V] {} VALUES;
    194 listxattr HOME [PATH, attribute_out(2), V] {} VALUES;
    195 llistxattr HOME [PATH, attribute_out(2), V] {} VALUES;
    196 flistxattr HOME [FD, attribute_out(2), V] {} VALUES;
    197 removexattr HOME [PATH, ATTRIBUTE] {} VALUES;
    198 lremovexattr HOME [PATH, ATTRIBUTE] {} VALUES;
    199 fremovexattr HOME [FD, ATTRIBUTE] {} VALUES;
    217 getdents64 HOME [FD, entries_out(2), V] {consumes()} "The directory's offset is the deputy's.";
    235 utimes HOME [PATH, input(2 * PAIR)] {} NAMES;
    257 openat HOME [FD, PATH, V, V] {waits(Restarts, NO_TIMEOUT)} NAMES;
    258 mkdirat HOME [FD, PATH, V] {} NAMES;
    259 mknodat HOME [FD, PATH, V, V] {} NAMES;
    260 fchownat HOME [FD, PATH, V, V, V] {} NAMES;
    261 futimesat HOME [FD, PATH, input(2 * PAIR)] {} NAMES;
    262 newfstatat HOME [FD, PATH, STAT, V] {} NAMES;
    263 unlinkat HOME [FD, PATH, V] {} NAMES;
    264 renameat HOME [FD, PATH, FD, PATH] {} NAMES;
    265 linkat HOME [FD, PATH, FD, PATH, V] {} NAMES;
    266 symlinkat HOME [PATH, FD, PATH] {} NAMES;
    267 readlinkat HOME [FD, PATH, link_out(3), V] {} NAMES;
    268 fchmodat HOME [FD, PATH, V] {} NAMES;
    269 faccessat HOME [FD, PATH, V] {} NAMES;
    280 utimensat HOME [FD, PATH, input(2 * PAIR), V] {} NAMES;
    303 name_to_handle_at HOME [FD, PATH, Shape::InOut(HANDLE), Shape::InOut(Len::Of(mount_id)), V] {} NAMES;
    304 open_by_handle_at HOME [FD, Shape::In(HANDLE), V] {waits(Restarts, NO_TIMEOUT)}
        "Handles name files of home.";
    316 renameat2 HOME [FD, PATH, FD, PATH, V] {} NAMES;
    332 statx HOME [FD, PATH, V, V, output(size::<libc::statx>())] {} NAMES;
    437 openat2 HOME [FD, PATH, struct_in(3, Width::Size, 4096), V] {waits(Restarts, NO_TIMEOUT)} NAMES;
    439 faccessat2 HOME [FD, PATH, V, V] {} NAMES;
    452 fchmodat2 HOME [FD, PATH, V, V] {} NAMES;
    463 setxattrat (homeward(reason::NESTED_ATTRIBUTES)) [FD, PATH, V, ATTRIBUTE, V, V] {}
        "Its struct points to the value; the older calls do without.";
    464 getxattrat (homeward(reason::NESTED_ATTRIBUTES)) [FD, PATH, V, ATTRIBUTE, V, V] {}
        "Its struct points to the value; the older calls do without.";
    465 listxattrat HOME [FD, PATH, V, attribute_out(4), V] {} VALUES;
    466 removexattrat HOME [FD, PATH, V, ATTRIBUTE] {} VALUES;
    468 file_getattr HOME [FD, PATH, struct_inout(3, Width::Size, 4096), V, V] {} NAMES;
    469 file_setattr HOME [FD, PATH, struct_in(3, Width::Size, 4096), V, V] {} NAMES;
}
