//! Network namespaces with one TUN device each. The test has the other end of the device, so that it
//! sees, holds and delivers every packet.

use rustix::fd::{AsFd, OwnedFd};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};

/// A network namespace. It ends with the last descriptor and socket in it.
pub(crate) struct Host {
    namespace: OwnedFd,
}

impl Host {
    /// A namespace with the addresses 10.0.0.N and fd00::N, and the other end of its device.
    pub(crate) fn new(number: u8) -> (Self, File) {
        let make = move || {
            enter_new_namespace();
            let tun = open_tun();
            let commands = format!(
                "link set lo up\naddr add 10.0.0.{number}/24 dev t0\n\
                 addr add fd00::{number}/64 dev t0 nodad\nlink set t0 up\n"
            );
            let mut ip = Command::new("ip").args(["-batch", "-"]).stdin(Stdio::piped()).spawn().unwrap();
            ip.stdin.take().unwrap().write_all(commands.as_bytes()).unwrap();
            assert!(ip.wait().unwrap().success());
            let namespace = File::open("/proc/thread-self/ns/net").unwrap();
            (Self { namespace: namespace.into() }, tun)
        };
        std::thread::spawn(make).join().unwrap()
    }

    /// Runs `act` in a thread in the namespace.
    pub(crate) fn run<R: Send>(&self, act: impl FnOnce() -> R + Send) -> R {
        let inside = || {
            move_into_link_name_space(self.namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            act()
        };
        std::thread::scope(|scope| scope.spawn(inside).join().unwrap())
    }

    /// Writes a setting below /proc/sys/net/ipv4.
    pub(crate) fn set(&self, name: &str, value: &str) {
        self.run(|| std::fs::write(format!("/proc/sys/net/ipv4/{name}"), value).unwrap());
    }
}

/// A counter of /proc/net/netstat, in the calling thread's namespace.
pub(crate) fn counter(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/net/netstat").unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let values = lines.chunks(2).flat_map(|pair| pair[0].split(' ').zip(pair[1].split(' ')));
    values.into_iter().find(|(key, _)| *key == name).unwrap().1.parse().unwrap()
}

fn enter_new_namespace() {
    // SAFETY: only the calling thread's network namespace changes, which is not memory.
    let result = unsafe { libc::unshare(libc::CLONE_NEWNET) };
    assert_eq!(result, 0, "unshare: {}", std::io::Error::last_os_error());
}

/// A TUN device named t0, without a header before its packets.
fn open_tun() -> File {
    const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
    const IFF_TUN_NO_PI: u16 = 0x1001;
    let tun = File::options().read(true).write(true).open("/dev/net/tun").unwrap();
    let mut request = [0_u8; 40];
    request[..2].copy_from_slice(b"t0");
    request[16..18].copy_from_slice(&IFF_TUN_NO_PI.to_ne_bytes());
    // SAFETY: the request has the size of `struct ifreq`, which the kernel reads and writes.
    let result = unsafe { libc::ioctl(tun.as_raw_fd(), TUNSETIFF as _, request.as_mut_ptr()) };
    assert_eq!(result, 0, "TUNSETIFF: {}", std::io::Error::last_os_error());
    tun
}
