//! How much one call may carry. Home recomputes every size under these limits, whatever the guest claims.

/// Bytes of data that one call carries in either direction. Reads and writes of more are cut to it, as the
/// kernel itself cuts them at 2 GiB; `Gathered::cut` tells, and the caller continues where that matters.
pub const PAYLOAD: u64 = 64 << 20;

/// Bytes of mailbox that one call may ask for: its data, and what describes and aligns it.
pub const MAILBOX: usize = (64 << 20) + (8 << 20);

/// Longest path, with its NUL (`PATH_MAX`).
pub const PATH: u32 = 4096;

/// Entries of one iovec array (`UIO_MAXIOV`), and messages of one sendmmsg or recvmmsg.
pub const SEGMENTS: u64 = 1024;

/// Entries of all iovec arrays of one call together.
pub const SEGMENTS_TOGETHER: usize = 64 << 10;

/// Bytes of control data of one message. The kernel's own limit for sending (`optmem_max`) is lower.
pub const CONTROL: u64 = 1 << 20;

/// Longest socket address (`sizeof(struct sockaddr_storage)`); the kernel cuts longer ones to it.
pub const ADDRESS: u32 = 128;

/// Highest descriptor number plus one that poll and select can name here (the kernel's default `nr_open`).
pub const DESCRIPTORS: u64 = 1 << 20;

/// Longest single argument or environment string, with its NUL (`MAX_ARG_STRLEN`).
pub const EXEC_STRING: usize = 128 << 10;

/// Arguments and environment together, with eight bytes of pointer for each (three quarters of `_STK_LIM`).
pub const EXEC_TOTAL: usize = 6 << 20;
