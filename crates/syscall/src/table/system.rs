//! The machine: names, mounts, modules, and calls that were removed.

use super::vocabulary::*;

const MACHINE: &str = "The machine that the program sees is its home.";
const ADMINISTRATION: &str = "It administers home, where the kernel decides whether the process may.";
const MOUNTS: &str = "The mounts are home's.";
const PAGE: u32 = 4096;
/// struct mnt_id_req begins with its size.
const MOUNT_REQUEST: Len =
    Len::Embedded(EmbeddedLen { at: 0, unit: 1, add: 0, zero: 4, max: PAGE, beyond: 4 });
/// The kernel checks the length first, and refuses longer names.
const HOST_NAME: Shape = struct_in(1, Width::Int, 64);

/// SYSLOG_ACTION_READ, READ_ALL and READ_CLEAR fill the buffer; others return sizes without using
/// it.
fn syslog(args: &[u64; 6]) -> &'static [Shape] {
    match args[0] as i32 {
        2..=4 => const { &[V, filled(counted(2, Width::Int, 1, 64 << 20, OverLimit::Cut), 1), V] },
        _ => const { &[V, V, V] },
    }
}

/// Option 1 converts a name to an index, and option 3 counts.
fn sysfs(args: &[u64; 6]) -> &'static [Shape] {
    match args[0] as i32 {
        1 => const { &[V, PATH] },
        _ => const { &[V, V, V] },
    }
}

fn sysfs_route(args: &[u64; 6]) -> Route {
    match args[0] as i32 {
        1 | 3 => Route::Home,
        _ => Route::Homeward(reason::FILE_SYSTEM_NAMES),
    }
}

/// LINUX_REBOOT_CMD_RESTART2 has a text argument.
fn reboot(args: &[u64; 6]) -> &'static [Shape] {
    match args[2] as u32 {
        0xa1b2_c3d4 => const { &[V, V, V, Shape::Text(256)] },
        _ => const { &[V, V, V, V] },
    }
}

/// SET_FLAG, SET_STRING, SET_BINARY, SET_PATH, SET_PATH_EMPTY, SET_FD; the others have no argument.
fn fsconfig(args: &[u64; 6]) -> &'static [Shape] {
    const KEY: Shape = Shape::Text(256);
    match args[1] as u32 {
        0 | 5 => const { &[FD, V, KEY, V, V] },
        1 => const { &[FD, V, KEY, Shape::Text(256), V] },
        2 => const { &[FD, V, KEY, struct_in(4, Width::Int, 1 << 20), V] },
        3 | 4 => const { &[FD, V, KEY, PATH, V] },
        _ => const { &[FD, V, V, V, V] },
    }
}

fn fsconfig_route(args: &[u64; 6]) -> Route {
    match args[1] as u32 {
        0..=8 => Route::Home,
        _ => Route::Homeward(reason::UNKNOWN_FSCONFIG),
    }
}

rows! {
    63 uname HOME [output(390)] {} MACHINE;
    99 sysinfo HOME [output(size::<libc::sysinfo>())] {} MACHINE;
    103 syslog HOME (by syslog, "by the action") {waits(Interrupted::Restarts, Timeout::None)} MACHINE;
    134 uselib NOSYS [] {} NEVER;
    139 sysfs (Rule::By(sysfs_route, "Home; Homeward for all but options 1 and 3")) (by sysfs, "by the option") {}
        "The file systems are home's; only option 2 writes to a buffer of unknown size.";
    153 vhangup HOME [] {} "The terminal is home's.";
    155 pivot_root HOME [PATH, PATH] {} MOUNTS;
    156 _sysctl NOSYS [] {} NEVER;
    163 acct HOME [PATH] {} ADMINISTRATION;
    165 mount HOME [PATH, PATH, Shape::Text(PAGE), V, Shape::Page] {} MOUNTS;
    166 umount2 HOME [PATH, V] {} MOUNTS;
    167 swapon HOME [PATH, V] {} ADMINISTRATION;
    168 swapoff HOME [PATH] {} ADMINISTRATION;
    169 reboot HOME (by reboot, "by the command") {} ADMINISTRATION;
    170 sethostname HOME [HOST_NAME, V] {} ADMINISTRATION;
    171 setdomainname HOME [HOST_NAME, V] {} ADMINISTRATION;
    174 create_module NOSYS [] {} NEVER;
    175 init_module HOME [struct_in(1, Width::Size, limits::MAX_DATA), V, PATH] {} ADMINISTRATION;
    176 delete_module HOME [Shape::Text(56), V] {} ADMINISTRATION;
    177 get_kernel_syms NOSYS [] {} NEVER;
    178 query_module NOSYS [] {} NEVER;
    179 quotactl (homeward(reason::QUOTAS)) [V, V, V, V] {} "Each of its commands has a struct of its own.";
    180 nfsservctl NOSYS [] {} NEVER;
    181 getpmsg NOSYS [] {} NEVER;
    182 putpmsg NOSYS [] {} NEVER;
    183 afs_syscall NOSYS [] {} NEVER;
    184 tuxcall NOSYS [] {} NEVER;
    185 security NOSYS [] {} NEVER;
    205 set_thread_area NOSYS [] {} NEVER;
    211 get_thread_area NOSYS [] {} NEVER;
    212 lookup_dcookie NOSYS [] {} "Removed from the kernel.";
    236 vserver NOSYS [] {} NEVER;
    246 kexec_load (homeward(reason::KEXEC)) [V, V, V, V] {} "Its segments are pointers within a struct.";
    313 finit_module HOME [FD, PATH, V] {} ADMINISTRATION;
    318 getrandom HERE [V, V, V] {} "Random bytes are equally good on every node.";
    320 kexec_file_load HOME [FD, FD, V, struct_in(2, Width::Size, PAGE as u64), V] {} ADMINISTRATION;
    321 bpf (homeward(reason::BPF)) [V, V, V] {} "Its programs and maps are reached by pointers within structs.";
    335 uretprobe NOSYS [] {} "Only a probe's own trampoline makes it, and probed processes do not migrate.";
    336 uprobe NOSYS [] {} "Only a probe's own trampoline makes it, and probed processes do not migrate.";
    428 open_tree HOME [FD, PATH, V] {} MOUNTS;
    429 move_mount HOME [FD, PATH, FD, PATH, V] {} MOUNTS;
    430 fsopen HOME [Shape::Text(PAGE), V] {} MOUNTS;
    431 fsconfig (Rule::By(fsconfig_route, "Home; Homeward for an unknown command"))
        (by fsconfig, "by the command") {} MOUNTS;
    432 fsmount HOME [FD, V, V] {} MOUNTS;
    433 fspick HOME [FD, PATH, V] {} MOUNTS;
    442 mount_setattr HOME [FD, PATH, V, struct_in(4, Width::Size, PAGE as u64), V] {} MOUNTS;
    443 quotactl_fd (homeward(reason::QUOTAS)) [FD, V, V, V] {} "Each of its commands has a struct of its own.";
    457 statmount HOME [Shape::In(MOUNT_REQUEST),
            Shape::Out(counted(2, Width::Size, 1, 1 << 20, OverLimit::Cut), Amount::SelfSized, When::AtLeast(0)), V, V] {}
        MOUNTS;
    458 listmount HOME [Shape::In(MOUNT_REQUEST), filled(counted(2, Width::Size, 8, 1 << 20, OverLimit::Cut), 8), V, V]
        {} MOUNTS;
    467 open_tree_attr HOME [FD, PATH, V, struct_in(4, Width::Size, PAGE as u64), V] {} MOUNTS;
}
