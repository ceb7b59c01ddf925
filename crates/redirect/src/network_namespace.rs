//! A network namespace that a descriptor keeps, without a name and a mount.

use crate::error::{NEEDS_NET_ADMIN, Result, WithRemedy};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;

/// The calling thread's network namespace; `/proc/self` would be that of the first thread.
const OWN_NAMESPACE: &str = "/proc/thread-self/ns/net";

/// Remedy for a thread that the system does not start.
const NEEDS_THREAD: &str = "raise the limits of threads and memory of this process";

/// A network namespace. It exists until all descriptors of it, sockets in it and processes in it are
/// closed or ended.
#[derive(Debug)]
pub struct NetworkNamespace {
    fd: OwnedFd,
}

impl NetworkNamespace {
    /// Makes a new one, in which only a loopback interface exists, and that is down.
    ///
    /// # Errors
    /// Without CAP_SYS_ADMIN, or if no thread can be started.
    #[allow(unsafe_code, reason = "unshare has no safe form")]
    pub fn create() -> Result<Self> {
        let made = on_thread(|| {
            // SAFETY: only the network namespace of this new thread changes. Descriptors stay shared.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            File::open(OWN_NAMESPACE)
        })?;
        let file = made.with_remedy(
            || "create a network namespace".to_owned(),
            "run it with CAP_SYS_ADMIN, and raise /proc/sys/user/max_net_namespaces if that is reached",
        )?;
        Ok(Self { fd: file.into() })
    }

    /// The network namespace of the calling thread.
    ///
    /// # Errors
    /// If /proc is not mounted.
    pub fn current() -> Result<Self> {
        let file = File::open(OWN_NAMESPACE).with_remedy(
            || format!("open {OWN_NAMESPACE}"),
            "mount /proc in this process's mount namespace",
        )?;
        Ok(Self { fd: file.into() })
    }

    /// The network namespace to which this socket belongs, for example a guest's socket after a
    /// restart of the daemon.
    ///
    /// # Errors
    /// If the descriptor is no socket, or without CAP_NET_ADMIN in the socket's namespace.
    #[allow(unsafe_code, reason = "SIOCGSKNS has no safe form")]
    pub fn of_socket(socket: impl AsFd) -> Result<Self> {
        /// `SIOCGSKNS` of `linux/sockios.h`, Linux 4.10; its argument is ignored.
        const GET_SOCKET_NAMESPACE: rustix::ioctl::Opcode = 0x894c;

        struct GetNamespace;
        // SAFETY: the request takes no pointer, and returns a new descriptor that has no other owner.
        unsafe impl rustix::ioctl::Ioctl for GetNamespace {
            type Output = OwnedFd;
            const IS_MUTATING: bool = false;

            fn opcode(&self) -> rustix::ioctl::Opcode {
                GET_SOCKET_NAMESPACE
            }

            fn as_ptr(&mut self) -> *mut libc::c_void {
                std::ptr::null_mut()
            }

            unsafe fn output_from_ptr(
                returned: rustix::ioctl::IoctlOutput,
                _argument: *mut libc::c_void,
            ) -> rustix::io::Result<OwnedFd> {
                // SAFETY: as above; the kernel returned this descriptor just now.
                Ok(unsafe { std::os::fd::FromRawFd::from_raw_fd(returned) })
            }
        }
        // SAFETY: the implementation above describes SIOCGSKNS.
        let fd = unsafe { rustix::ioctl::ioctl(socket, GetNamespace) };
        let fd = fd.with_remedy(|| "find the network namespace of a socket".to_owned(), NEEDS_NET_ADMIN)?;
        Ok(Self { fd })
    }

    /// Runs a function on a new thread in this namespace and waits for it. Sockets that it opens and
    /// processes that it starts belong to this namespace.
    ///
    /// # Errors
    /// Without CAP_SYS_ADMIN, or if no thread can be started. A panic of `function` continues here.
    pub fn run<T: Send>(&self, function: impl FnOnce() -> T + Send) -> Result<T> {
        on_thread(|| {
            move_into_link_name_space(self.fd.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(function())
        })?
        .with_remedy(|| "enter a network namespace".to_owned(), "run it with CAP_SYS_ADMIN")
    }

    /// A second descriptor of the same namespace.
    ///
    /// # Errors
    /// At the limit of open files.
    pub fn try_clone(&self) -> Result<Self> {
        let fd = self.fd.try_clone().with_remedy(
            || "duplicate the descriptor of a network namespace".to_owned(),
            "raise the limit of open files (ulimit -n)",
        )?;
        Ok(Self { fd })
    }
}

impl AsFd for NetworkNamespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<OwnedFd> for NetworkNamespace {
    /// `fd` is an open file of a network namespace, as in `/proc/PID/ns/net`. A descriptor of another
    /// kind makes later operations fail.
    fn from(fd: OwnedFd) -> Self {
        Self { fd }
    }
}

/// Namespaces are a property of the thread, so that the caller's thread must not change its own.
fn on_thread<T: Send>(function: impl FnOnce() -> io::Result<T> + Send) -> Result<io::Result<T>> {
    thread::scope(|scope| {
        let spawned = thread::Builder::new().name("netns".to_owned()).spawn_scoped(scope, function);
        let thread = spawned.with_remedy(|| "start a thread".to_owned(), NEEDS_THREAD)?;
        Ok(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}
