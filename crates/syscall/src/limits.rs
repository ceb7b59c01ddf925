//! Limits on the size of a call. Home computes every size under these limits, without trusting the
//! guest.

/// Maximum bytes of data in one call, in either direction. Longer reads and writes are cut to it,
/// as the kernel cuts them at 2 GiB. `Gathered::is_cut` reports this, and the guest's shim repeats
/// a read, write, pread64, pwrite64 or sendto for the remainder.
pub const MAX_DATA: u64 = 64 << 20;

/// Maximum mailbox size of one call: its data, headers, pointers and alignment, in bytes.
pub const MAX_MAILBOX: usize = (64 << 20) + (8 << 20);

/// Maximum length of a path, with its NUL (`PATH_MAX`).
pub const MAX_PATH: u32 = 4096;

/// Maximum entries of an iovec array (`UIO_MAXIOV`), and messages of a sendmmsg or recvmmsg.
pub const MAX_SEGMENTS: u64 = 1024;

/// Maximum entries of all iovec arrays of one call.
pub const MAX_TOTAL_SEGMENTS: usize = 64 << 10;

/// Maximum control data of a message, in bytes. The kernel's own limit for sending (`optmem_max`)
/// is lower.
pub const MAX_CONTROL: u64 = 1 << 20;

/// Maximum length of a socket address (`sizeof(struct sockaddr_storage)`), to which the kernel cuts
/// longer ones.
pub const MAX_ADDRESS: u32 = 128;

/// Maximum number of descriptors in one poll or select (the kernel's default `nr_open`).
pub const MAX_DESCRIPTORS: u64 = 1 << 20;

/// Maximum number of bytes that the kernel transfers in one call (`MAX_RW_COUNT` in Linux's fs.h).
pub const MAX_TRANSFER: u64 = (i32::MAX as u64) & !4095;

/// Maximum length of an argument or environment string, with its NUL (`MAX_ARG_STRLEN`).
pub const MAX_EXEC_STRING: usize = 128 << 10;

/// Maximum size of arguments and environment, with an eight-byte pointer for each string (three
/// quarters of `_STK_LIM`).
pub const MAX_EXEC_TOTAL: usize = 6 << 20;
