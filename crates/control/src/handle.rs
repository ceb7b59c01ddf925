//! File handles of the kernel: name_to_handle_at(2), for comparing files, and open_by_handle_at(2).
#![allow(unsafe_code, reason = "the call has no safe wrapper")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// The maximum length of a handle's bytes.
const MAX_HANDLE_LEN: usize = libc::MAX_HANDLE_SZ as usize;

/// `struct file_handle` followed by its bytes.
#[repr(C)]
struct HandleBuffer {
    head: libc::file_handle,
    bytes: [u8; MAX_HANDLE_LEN],
}

impl HandleBuffer {
    /// The type and bytes of the handle.
    fn into_parts(self) -> (i32, Vec<u8>) {
        let length = usize::try_from(self.head.handle_bytes).unwrap_or(MAX_HANDLE_LEN);
        (self.head.handle_type, self.bytes.get(..length).unwrap_or(&self.bytes).to_vec())
    }
}

/// The type and bytes of a file's handle. Two open files of one file system with equal handles are
/// the same file, even on different machines if the file system is a network file system.
///
/// # Errors
/// If the file system does not support handles.
pub fn name_to_handle(fd: impl AsFd) -> io::Result<(i32, Vec<u8>)> {
    let fd = fd.as_fd().as_raw_fd();
    // AT_HANDLE_FID: a handle for comparing is enough, and overlayfs has such handles too. Before
    // Linux 6.5 there are only handles for opening.
    let buffer = read_handle(fd, libc::AT_EMPTY_PATH | libc::AT_HANDLE_FID)
        .or_else(|_old_kernel| read_handle(fd, libc::AT_EMPTY_PATH))?;
    Ok(buffer.into_parts())
}

/// The type and bytes of a file's handle, for [`open_by_handle`].
///
/// # Errors
/// If the file system does not support handles for opening.
pub fn handle_to_open(fd: impl AsFd) -> io::Result<(i32, Vec<u8>)> {
    read_handle(fd.as_fd().as_raw_fd(), libc::AT_EMPTY_PATH).map(HandleBuffer::into_parts)
}

/// Opens (`O_PATH`) the file with this handle, on the file system that `file_system` is on.
///
/// # Errors
/// If there is no such file, or without CAP_DAC_READ_SEARCH.
pub fn open_by_handle(file_system: impl AsFd, kind: i32, bytes: &[u8]) -> io::Result<OwnedFd> {
    let length = bytes.len().min(MAX_HANDLE_LEN);
    let head = libc::file_handle { handle_bytes: length as u32, handle_type: kind, f_handle: [] };
    let mut buffer = HandleBuffer { head, bytes: [0; MAX_HANDLE_LEN] };
    buffer.bytes[..length].copy_from_slice(&bytes[..length]);
    let flags = libc::O_PATH | libc::O_CLOEXEC;
    // SAFETY: `buffer` has at least `handle_bytes` bytes behind its head, and is only read.
    let fd =
        unsafe { libc::open_by_handle_at(file_system.as_fd().as_raw_fd(), (&raw mut buffer).cast(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn read_handle(fd: i32, flags: i32) -> io::Result<HandleBuffer> {
    let head = libc::file_handle { handle_bytes: MAX_HANDLE_LEN as u32, handle_type: 0, f_handle: [] };
    let mut buffer = HandleBuffer { head, bytes: [0; MAX_HANDLE_LEN] };
    let mut mount_id = 0;
    // SAFETY: `buffer` has at least `handle_bytes` bytes behind its head, all three pointers stay
    // valid for the call, and the caller keeps `fd` open.
    let done = unsafe {
        libc::name_to_handle_at(fd, c"".as_ptr(), (&raw mut buffer).cast(), &raw mut mount_id, flags)
    };
    if done == 0 { Ok(buffer) } else { Err(io::Error::last_os_error()) }
}
