//! ioctl: the shape of its third argument, by the request. A request is known if it is listed, or
//! if it is of a family whose numbers state the size of a payload without pointers. An unknown
//! request fetches the process home, since its payload may hide a pointer, which home's kernel
//! would follow in the deputy's memory.

use super::vocabulary::*;
use linux_raw_sys::ioctl::*;

/// The payload of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Payload {
    /// None, or a number.
    Number,
    /// This many bytes that the kernel reads.
    In(u32),
    /// This many bytes that the kernel writes.
    Out(u32),
    /// This many bytes that the kernel reads, and may write in part.
    InOut(u32),
    /// struct fiemap with the number of extents that it states.
    Fiemap,
}

use Payload::{Fiemap, In, InOut, Number, Out};

const INT: u32 = 4;
const TERMIOS: u32 = 36;
const TERMIOS2: u32 = 44;
const TERMIO: u32 = 18;
const WINSIZE: u32 = 8;
const IFREQ: u32 = 40;
const ARPREQ: u32 = 68;
const TIME: u32 = PAIR;

const REQUESTS: &[(u32, Payload)] = &[
    // any descriptor
    (FIOCLEX, Number),
    (FIONCLEX, Number),
    (FIONBIO, In(INT)),
    (FIOASYNC, In(INT)),
    (FIONREAD, Out(INT)),
    (FIOQSIZE, Out(8)),
    (FIOSETOWN, In(INT)),
    (FIOGETOWN, Out(INT)),
    // terminals
    (TCGETS, Out(TERMIOS)),
    (TCSETS, In(TERMIOS)),
    (TCSETSW, In(TERMIOS)),
    (TCSETSF, In(TERMIOS)),
    (TCGETS2, Out(TERMIOS2)),
    (TCSETS2, In(TERMIOS2)),
    (TCSETSW2, In(TERMIOS2)),
    (TCSETSF2, In(TERMIOS2)),
    (TCGETA, Out(TERMIO)),
    (TCSETA, In(TERMIO)),
    (TCSETAW, In(TERMIO)),
    (TCSETAF, In(TERMIO)),
    (TIOCGLCKTRMIOS, Out(TERMIOS)),
    (TIOCSLCKTRMIOS, In(TERMIOS)),
    (TIOCGWINSZ, Out(WINSIZE)),
    (TIOCSWINSZ, In(WINSIZE)),
    (TIOCGPGRP, Out(INT)),
    (TIOCSPGRP, In(INT)),
    (TIOCGSID, Out(INT)),
    (TIOCSCTTY, Number),
    (TIOCNOTTY, Number),
    (TIOCOUTQ, Out(INT)),
    (TIOCSTI, In(1)),
    (TIOCGETD, Out(INT)),
    (TIOCSETD, In(INT)),
    (TIOCMGET, Out(INT)),
    (TIOCMSET, In(INT)),
    (TIOCMBIS, In(INT)),
    (TIOCMBIC, In(INT)),
    (TIOCMIWAIT, Number),
    (TIOCGSOFTCAR, Out(INT)),
    (TIOCSSOFTCAR, In(INT)),
    (TIOCGSERIAL, InOut(72)),
    (TIOCGICOUNT, InOut(80)),
    (TIOCPKT, In(INT)),
    (TIOCGPKT, Out(INT)),
    (TIOCGPTN, Out(INT)),
    (TIOCSPTLCK, In(INT)),
    (TIOCGPTLCK, Out(INT)),
    (TIOCGPTPEER, Number),
    (TIOCGEXCL, Out(INT)),
    (TIOCEXCL, Number),
    (TIOCNXCL, Number),
    (TIOCGDEV, Out(INT)),
    (TIOCCONS, Number),
    (TIOCVHANGUP, Number),
    (TIOCSIG, Number),
    (TIOCSBRK, Number),
    (TIOCCBRK, Number),
    (TCSBRK, Number),
    (TCSBRKP, Number),
    (TCXONC, Number),
    (TCFLSH, Number),
    // sockets and interfaces
    (SIOCSPGRP, In(INT)),
    (SIOCGPGRP, Out(INT)),
    (SIOCATMARK, Out(INT)),
    (SIOCGSTAMP, Out(TIME)),
    (SIOCGSTAMP_NEW, Out(TIME)),
    (SIOCGSTAMPNS_NEW, Out(TIME)),
    (SIOCGIFNAME, InOut(IFREQ)),
    (SIOCGIFFLAGS, InOut(IFREQ)),
    (SIOCSIFFLAGS, In(IFREQ)),
    (SIOCGIFADDR, InOut(IFREQ)),
    (SIOCSIFADDR, In(IFREQ)),
    (SIOCGIFDSTADDR, InOut(IFREQ)),
    (SIOCSIFDSTADDR, In(IFREQ)),
    (SIOCGIFBRDADDR, InOut(IFREQ)),
    (SIOCSIFBRDADDR, In(IFREQ)),
    (SIOCGIFNETMASK, InOut(IFREQ)),
    (SIOCSIFNETMASK, In(IFREQ)),
    (SIOCGIFMETRIC, InOut(IFREQ)),
    (SIOCSIFMETRIC, In(IFREQ)),
    (SIOCGIFMTU, InOut(IFREQ)),
    (SIOCSIFMTU, In(IFREQ)),
    (SIOCGIFHWADDR, InOut(IFREQ)),
    (SIOCSIFHWADDR, In(IFREQ)),
    (SIOCGIFINDEX, InOut(IFREQ)),
    (SIOCGIFMAP, InOut(IFREQ)),
    (SIOCGIFTXQLEN, InOut(IFREQ)),
    (SIOCSIFTXQLEN, In(IFREQ)),
    (SIOCADDMULTI, In(IFREQ)),
    (SIOCDELMULTI, In(IFREQ)),
    (SIOCGARP, InOut(ARPREQ)),
    (SIOCSARP, In(ARPREQ)),
    (SIOCDARP, In(ARPREQ)),
    // files and file systems
    (FIBMAP, InOut(INT)),
    (FIGETBSZ, Out(INT)),
    (FIFREEZE, Number),
    (FITHAW, Number),
    (FITRIM, InOut(24)),
    (FICLONE, Number),
    (FICLONERANGE, In(32)),
    // The request numbers state the size of a long, but the kernel transfers an int.
    (FS_IOC_GETFLAGS, Out(INT)),
    (FS_IOC_SETFLAGS, In(INT)),
    (FS_IOC_GETVERSION, Out(INT)),
    (FS_IOC_SETVERSION, In(INT)),
    (FS_IOC_FIEMAP, Fiemap),
    (FS_IOC_FSGETXATTR, Out(28)),
    (FS_IOC_FSSETXATTR, In(28)),
    (FS_IOC_GETFSLABEL, Out(256)),
    (FS_IOC_SETFSLABEL, In(256)),
    // block devices
    (BLKGETSIZE64, Out(8)),
    (BLKGETSIZE, Out(8)),
    (BLKSSZGET, Out(INT)),
    (BLKPBSZGET, Out(INT)),
    (BLKBSZGET, Out(INT)),
    (BLKBSZSET, In(INT)),
    (BLKIOMIN, Out(INT)),
    (BLKIOOPT, Out(INT)),
    (BLKALIGNOFF, Out(INT)),
    (BLKDISCARDZEROES, Out(INT)),
    (BLKROTATIONAL, Out(2)),
    (BLKSECTGET, Out(2)),
    (BLKROGET, Out(INT)),
    (BLKROSET, In(INT)),
    (BLKRAGET, Out(8)),
    (BLKRASET, Number),
    (BLKFLSBUF, Number),
    (BLKRRPART, Number),
    (BLKDISCARD, In(16)),
    (BLKSECDISCARD, In(16)),
    (BLKZEROOUT, In(16)),
    // the random device
    (RNDGETENTCNT, Out(INT)),
    (RNDADDTOENTCNT, In(INT)),
    (RNDZAPENTCNT, Number),
    (RNDCLEARPOOL, Number),
    (RNDRESEEDCRNG, Number),
];

const IOC_WRITE: u32 = 1;
const IOC_READ: u32 = 2;

/// Families whose request numbers state the size of a payload without pointers: input devices,
/// joysticks, raw HID and HID, clocks, watchdogs and raw MIDI. A request of the same letters
/// (Documentation/userspace-api/ioctl/ioctl-number.rst) is left out if it states another size or
/// direction than the kernel transfers, takes a number, or has a pointer in its payload.
fn by_number(request: u32) -> Option<Payload> {
    let (direction, size) = (request >> 30, request >> 16 & 0x3fff);
    let (family, number) = ((request >> 8) as u8, request as u8);
    let flat = match family {
        // Force feedback and masks have pointers.
        b'E' => !matches!(number, 0x80 | 0x92 | 0x93),
        // The requests for the correction of all axes state the size for one axis.
        b'j' => !matches!(number, 0x21 | 0x22),
        // The numbers from 0xc8 on are Bluetooth's, with pointers and larger payloads. Number 3
        // with IOC_WRITE loads a program into a sound device, and has a pointer.
        b'H' => number <= 0x14 && (number, direction) != (3, IOC_WRITE),
        // The interrupt rate and the epoch (0xc, 0xe) are set by a number; parameters (0x15, 0x16)
        // have a pointer. The requests from 0xa1 on are of PPS, and state the size of a pointer.
        b'p' => number <= 0x14 && !(matches!(number, 0xc | 0xe) && direction == IOC_WRITE),
        b'W' => true,
        _ => false,
    };
    match (direction, size) {
        _ if !flat => None,
        (0, 0) => Some(Number),
        (IOC_WRITE, 1..) => Some(In(size)),
        (direction, 1..) if direction & IOC_READ != 0 => Some(InOut(size)),
        _ => None,
    }
}

fn payload(args: &[u64; 6]) -> Option<Payload> {
    let request = args[1] as u32;
    let listed = REQUESTS.iter().find(|(listed, _)| *listed == request).map(|(_, payload)| *payload);
    listed.or_else(|| by_number(request))
}

fn bytes(args: &[u64; 6]) -> u32 {
    match payload(args) {
        Some(In(len) | Out(len) | InOut(len)) => len,
        Some(Number | Fiemap) | None => 0,
    }
}

/// Home if the payload is known.
pub(super) fn route(args: &[u64; 6]) -> Route {
    if payload(args).is_some() { Route::Home } else { Route::Homeward(reason::UNKNOWN_IOCTL) }
}

/// The shapes of a request's arguments.
pub(super) fn shapes(args: &[u64; 6]) -> &'static [Shape] {
    const LEN: Len = Len::Of(bytes);
    const FIEMAP: Len =
        Len::Embedded(EmbeddedLen { at: 24, unit: 56, add: 32, zero: 0, max: 16 << 20, beyond: 0 });
    match payload(args) {
        Some(In(_)) => const { &[FD, V, Shape::In(LEN)] },
        Some(Out(_)) => const { &[FD, V, Shape::Out(LEN, Amount::Whole, When::AtLeast(0))] },
        Some(InOut(_)) => const { &[FD, V, Shape::InOut(LEN)] },
        Some(Fiemap) => const { &[FD, V, Shape::InOut(FIEMAP)] },
        Some(Number) | None => const { &[FD, V, V] },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_request_is_listed_twice() {
        for (i, (request, _)) in REQUESTS.iter().enumerate() {
            // FIONREAD and TIOCINQ are the same number, and so are SIOCOUTQ and TIOCOUTQ.
            assert!(REQUESTS[..i].iter().all(|(other, _)| other != request), "{request:#x}");
        }
    }

    #[test]
    fn requests_that_could_hide_pointers_are_homeward() {
        let listed = [SIOCGIFCONF, FIDEDUPERANGE, TIOCLINUX, EVIOCSFF, EVIOCGMASK, EVIOCSMASK, 0x8946];
        let unlisted = [
            0x4004_48c8, // HIDPCONNADD
            0x8004_48d2, // HIDPGETCONNLIST
            0x4068_4803, // SNDRV_HWDEP_IOCTL_DSP_LOAD
            0x4024_6a21, // JSIOCSCORR
            0x8024_6a22, // JSIOCGCORR
            0x4008_700c, // RTC_IRQP_SET
            0x4018_7015, // RTC_PARAM_GET
            0x8008_70a1, // PPS_GETPARAMS
        ];
        for request in listed.into_iter().chain(unlisted) {
            let route = route(&[0, request.into(), 0, 0, 0, 0]);
            assert_eq!(route, Route::Homeward(reason::UNKNOWN_IOCTL), "{request:#x}");
        }
    }

    #[test]
    fn requests_that_state_their_payload_are_made_at_home() {
        for request in [EVIOCGVERSION, 0x8008_4803, 0x8004_6a01, RTC_RD_TIME, WDIOC_GETTIMEOUT] {
            assert_eq!(route(&[0, request.into(), 0, 0, 0, 0]), Route::Home, "{request:#x}");
        }
    }

    #[test]
    fn sizes_agree_with_the_numbers_that_state_them() {
        // Among the requests whose number states a size, only these differ: they transfer an int in
        // place of a long, or a variable length (FIEMAP), or have no pointer.
        let odd = [FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_IOC_GETVERSION, FS_IOC_SETVERSION, FS_IOC_FIEMAP];
        let longs = [BLKBSZGET, BLKBSZSET, FICLONE, FIFREEZE, FITHAW, TIOCSIG];
        for (request, payload) in REQUESTS {
            let stated = request >> 16 & 0x3fff;
            if stated == 0 || odd.contains(request) || longs.contains(request) {
                continue;
            }
            assert!(matches!(payload, In(n) | Out(n) | InOut(n) if *n == stated), "{request:#x}");
        }
    }
}
