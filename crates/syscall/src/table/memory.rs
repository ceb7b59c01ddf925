//! The address space, which is the guest's own.

use super::vocabulary::*;

const OWN: &str = "The memory is the guest's own.";
const FUTEX: &str =
    "The word and its waiters are the guest's; processes that share the word are on the same node.";
/// A call of futex that does not wait, waits without a time limit, or until a given time. FUTEX_WAIT alone
/// has a relative time limit.
const NO_RELATIVE_WAIT: ArgTest = ArgTest::DiffersOrNull {
    arg: 1,
    mask: !libc::FUTEX_PRIVATE_FLAG as u32,
    value: libc::FUTEX_WAIT as u32,
    pointer: 3,
};

fn timed(_: &[u64; 6]) -> Route {
    Route::Timed
}

const NUMA: &str = "Home's memory nodes do not exist on the guest's node.";
const NO_KEYS: &str =
    "Answered as on a CPU without protection keys, so that no guest comes to depend on them.";

const MAP_SHARED: u64 = 1;
const MAP_ANONYMOUS: u64 = 0x20;

const MAP_HUGETLB: u64 = 0x4_0000;

/// Private, anonymous and of ordinary pages: no other process sees it, and every node has them.
const OWN_MAPPING: ArgTest = ArgTest::Masked {
    arg: 3,
    mask: (MAP_ANONYMOUS | MAP_SHARED | MAP_HUGETLB) as u32,
    value: MAP_ANONYMOUS as u32,
};

fn mmap(args: &[u64; 6]) -> Route {
    let flags = args[3];
    if flags & MAP_HUGETLB != 0 && flags & MAP_ANONYMOUS != 0 {
        return Route::Homeward(reason::HUGE_PAGES);
    }
    Route::Both(SplitCall::Mmap)
}

/// Without MS_SYNC, msync only begins what the kernel does in any case.
const NOT_SYNC: ArgTest = ArgTest::Masked { arg: 2, mask: libc::MS_SYNC as u32, value: 0 };

fn msync(_: &[u64; 6]) -> Route {
    Route::Both(SplitCall::Msync)
}

/// pkey_mprotect without a key is mprotect.
const NO_KEY: ArgTest = ArgTest::OneOf { arg: 3, values: &[u32::MAX] };

fn unallocated_key(_: &[u64; 6]) -> Route {
    Route::Refuse(libc::EINVAL)
}

const POLICY: &str = "A thread's policy is the deputy's, and in force at home; the guest's node places pages by its own policy.";
/// MPOL_F_ADDR
const OF_ADDRESS: ArgTest = ArgTest::Masked { arg: 4, mask: 2, value: 2 };
/// A mask of memory nodes, in 64-bit words. Its number of bits is the third argument less one; the
/// kernel reads at most a page.
const NODES: Len = Len::Of(|args| match args[2] {
    0 => 0,
    bits => ((bits - 1).min(8 << 12).div_ceil(64) * 8) as u32,
});

fn thread_policy(_: &[u64; 6]) -> Route {
    Route::Home
}

rows! {
    9 mmap (Rule::HereIf(OWN_MAPPING, mmap, "Here for private anonymous memory; Both (Mmap) for files \
            and for shared memory; Homeward for huge pages"))
        [V, V, V, V, FD, V] {}
        "The guest's memory is its own, a file's content comes from home. A file that is mapped shared and \
         may be written becomes shared memory of the process, or the process goes home.";
    10 mprotect HERE [V, V, V] {} OWN;
    11 munmap HERE [V, V] {} OWN;
    12 brk HERE [V] {} OWN;
    25 mremap HERE [V, V, V, V, V] {} OWN;
    26 msync (Rule::HereIf(NOT_SYNC, msync, "Here without MS_SYNC; otherwise Both (Msync)")) [V, V, V] {}
        "A file of home that is shared memory can be written to the disk only at home.";
    27 mincore HERE [V, V, V] {} OWN;
    28 madvise HERE [V, V, V] {} OWN;
    149 mlock HERE [V, V] {} "The memory to lock is the guest's; it counts against the limit there.";
    150 munlock HERE [V, V] {} OWN;
    151 mlockall (homeward(reason::LOCKED_MEMORY)) [V] {}
        "The memory of a program that locks all of it must stay at home.";
    152 munlockall HERE [] {} OWN;
    202 futex (Rule::HereIf(NO_RELATIVE_WAIT, timed, "Here; trapped if it waits for a relative time"))
        [V, V, V, V, V, V] {waits(Interrupted::RestartBlock, Timeout::Timespec(3))} FUTEX;
    216 remap_file_pages (homeward(reason::SHARED_MEMORY)) [V, V, V, V, V] {}
        "It rearranges shared mappings, which do not exist away.";
    237 mbind (homeward(reason::MEMORY_PLACEMENT)) [V, V, V, V, V, V] {} NUMA;
    238 set_mempolicy HOME [V, Shape::In(NODES), V] {} POLICY;
    239 get_mempolicy (Rule::HereIf(OF_ADDRESS, thread_policy, "Here for an address; else Home"))
        [output(4), Shape::Out(NODES, Amount::Whole, When::AtLeast(0)), V, V, V] {}
        "A thread's policy is the deputy's; only the guest's node knows where a page is.";
    256 migrate_pages (homeward(reason::MEMORY_PLACEMENT)) [V, V, V, V] {} NUMA;
    279 move_pages (homeward(reason::MEMORY_PLACEMENT)) [V, V, V, V, V, V] {} NUMA;
    310 process_vm_readv (homeward(reason::OTHER_MEMORY)) [V, V, V, V, V, V] {}
        "The other process is at home, and this one's memory is not.";
    311 process_vm_writev (homeward(reason::OTHER_MEMORY)) [V, V, V, V, V, V] {}
        "The other process is at home, and this one's memory is not.";
    323 userfaultfd NOSYS [V] {}
        "Tern itself uses it on the guest's memory; programs work without it.";
    324 membarrier HERE [V, V, V] {} "It orders the accesses of the guest's own threads.";
    325 mlock2 HERE [V, V, V] {} "The memory to lock is the guest's; it counts against the limit there.";
    329 pkey_mprotect (Rule::HereIf(NO_KEY, unallocated_key, "Here without a key (-1); else refused with EINVAL"))
        [V, V, V, V] {} NO_KEYS;
    330 pkey_alloc (Rule::Always(Route::Refuse(libc::ENOSPC))) [V, V] {} NO_KEYS;
    331 pkey_free (Rule::Always(Route::Refuse(libc::EINVAL))) [V] {} NO_KEYS;
    440 process_madvise (homeward(reason::OTHER_MEMORY)) [V, V, V, V, V] {}
        "The other process is at home; when it is the caller itself, its memory is not.";
    449 futex_waitv HERE [V, V, V, V, V] {waits(Interrupted::Restarts, Timeout::Absolute(3))} FUTEX;
    450 set_mempolicy_home_node (homeward(reason::MEMORY_PLACEMENT)) [V, V, V, V] {} NUMA;
    453 map_shadow_stack (Rule::Always(Route::Refuse(libc::EOPNOTSUPP))) [V, V, V] {}
        "Answered as on a CPU without shadow stacks, which do not migrate yet.";
    454 futex_wake HERE [V, V, V, V] {} FUTEX;
    455 futex_wait HERE [V, V, V, V, V, V] {waits(Interrupted::Restarts, Timeout::Absolute(4))} FUTEX;
    456 futex_requeue HERE [V, V, V, V] {} FUTEX;
    462 mseal (homeward(reason::SEALED_MEMORY)) [V, V, V] {}
        "Sealed memory can never be unmapped, so its process stays where it is.";
}
