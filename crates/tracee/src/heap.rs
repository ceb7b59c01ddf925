//! The memory that this process has allocated and freed.

/// Blocks up to this many bytes are of the heap, and the heap's end is given back when so much of it is free.
const BLOCK: i32 = 1 << 20;
const END: i32 = 8 << 20;

/// Keeps what is freed for what is allocated next: without it each message of some hundred kilobytes is put into memory that the kernel has
/// just cleared, page by page, and gives that back. To be said at the beginning.
pub fn keep() {
    #[cfg(target_env = "gnu")]
    // SAFETY: they take two numbers, and change nothing but when memory is given back; there is one thread as yet.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, BLOCK);
        libc::mallopt(libc::M_TRIM_THRESHOLD, END);
    }
}
