//! The heap of this process.

/// Allocations above this size, in bytes, are mapped instead of taken from the heap.
const MMAP_THRESHOLD: i32 = 1 << 20;
/// Number of free bytes at the heap's end above which the allocator returns them to the kernel.
const TRIM_THRESHOLD: i32 = 8 << 20;

/// Makes the allocator keep freed memory for reuse. By default it allocates every message of some
/// hundred kilobytes in new pages, which the kernel first clears, and returns them to the kernel
/// when the message is freed. Call it at the start of main.
pub fn keep_freed() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt takes two integers, and changes only the allocator's thresholds. No other
    // thread runs yet.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD);
        libc::mallopt(libc::M_TRIM_THRESHOLD, TRIM_THRESHOLD);
    }
}
