//! The shape of an argument: how many bytes are behind a pointer, in which direction they are
//! copied, and how many the kernel has written when the call returns.

use std::fmt;

/// The shape of one argument. NULL is allowed everywhere, and passed on for the kernel to judge.
#[derive(Debug, Clone, Copy)]
pub enum Shape {
    /// A number, passed unchanged.
    Value,
    /// A descriptor (or AT_FDCWD), passed unchanged, since it is the deputy's.
    Fd,
    /// Text up to a NUL, of at most this length with it.
    Text(u32),
    /// Up to a page of data, as much as can be read (mount's data).
    Page,
    /// Read by the kernel.
    In(Len),
    /// Read, and possibly written, by the kernel; copied back if it changed.
    InOut(Len),
    /// As `InOut`, but a call that succeeds always writes it, so that it fails if it cannot.
    Rewritten(Len),
    /// The remaining time of a timeout, this many bytes. Write faults are ignored as in the kernel,
    /// since programs may keep it in read-only memory.
    TimeLeft(u32),
    /// Written by the kernel.
    Out(Len, Amount, When),
    /// A length of a buffer, read and then overwritten with the true length: an int, cut to `max`.
    Length {
        /// Maximum size of the buffer at home.
        max: u32,
        /// Whether a negative length is passed on, for the kernel to refuse.
        signed: bool,
    },
    /// An iovec array with as many entries as that argument says.
    Segments(Direction, u8),
    /// One struct msghdr, or as many struct mmsghdr as that argument says.
    Messages(Direction, Option<u8>),
    /// A NULL-terminated array of strings (argv, envp).
    Strings,
    /// pselect6's last argument: a pointer to a signal mask, and its size.
    MaskPair,
}

/// The direction of data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the guest.
    Send,
    /// To the guest.
    Receive,
}

/// Number of bytes behind a pointer.
#[derive(Debug, Clone, Copy)]
pub enum Len {
    /// A fixed number.
    Fixed(u32),
    /// Given by an argument.
    Arg(Count),
    /// One bit for each descriptor below that argument, in 64-bit words (fd_set).
    Bits(u8),
    /// The number that this argument, a [`Shape::Length`], points to.
    Pointed(u8),
    /// Given by a number in the struct itself.
    Embedded(EmbeddedLen),
    /// Computed from the arguments.
    Of(fn(&[u64; 6]) -> u32),
}

/// A length that an argument states: `argument × size + add` bytes.
#[derive(Debug, Clone, Copy)]
pub struct Count {
    /// The argument.
    pub arg: u8,
    /// How the kernel reads it.
    pub width: Width,
    /// Bytes per element.
    pub size: u32,
    /// Bytes before the first element.
    pub add: u32,
    /// Maximum value of the argument.
    pub max: u64,
    /// The effect of a higher value.
    pub over_limit: OverLimit,
}

/// How the kernel reads a count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// size_t
    Size,
    /// int
    Int,
    /// unsigned int
    UInt,
}

/// The effect of a count above the maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverLimit {
    /// It is lowered: the kernel may do less than requested.
    Cut,
    /// It is passed unchanged with a pointer that faults: the kernel refuses such a count before it
    /// accesses the memory.
    Refused,
}

/// A length given by a 32-bit number inside of the struct: `number × unit + add` bytes, at most
/// `max`.
#[derive(Debug, Clone, Copy)]
pub struct EmbeddedLen {
    /// Offset of the number.
    pub at: u32,
    /// Bytes per unit.
    pub unit: u32,
    /// Bytes in addition.
    pub add: u32,
    /// The value that zero stands for.
    pub zero: u32,
    /// Maximum number of bytes.
    pub max: u32,
    /// Number of bytes to send if the length exceeds `max`: the kernel reads these and then refuses
    /// the number. 0 if the kernel might accept the number; it then gets a pointer that faults.
    pub beyond: u32,
}

/// How much of an output the kernel has written.
#[derive(Debug, Clone, Copy)]
pub enum Amount {
    /// All of it.
    Whole,
    /// `result × size + add` bytes.
    Result {
        /// Bytes of an element.
        size: u32,
        /// Bytes before the first element.
        add: u32,
    },
    /// The result's number of bytes. The kernel leaves padding between them unchanged.
    Padded,
    /// Given by the number behind this argument, a [`Shape::Length`], after the call.
    Pointed(u8),
    /// Given by the 32-bit number at the start of the output.
    SelfSized,
}

/// The results of a call that mean that the kernel has written an output.
#[derive(Debug, Clone, Copy)]
pub enum When {
    /// The result is at least this.
    AtLeast(i64),
    /// The call was interrupted: -EINTR, or the kernel's own ERESTART_RESTARTBLOCK.
    Interrupted,
}

impl Count {
    /// The argument as the kernel reads it; `None` if it is negative, which the kernel refuses.
    pub(crate) fn raw(&self, args: &[u64; 6]) -> Option<u64> {
        let raw = args[usize::from(self.arg)];
        match self.width {
            Width::UInt => Some(raw & 0xffff_ffff),
            Width::Int => u64::try_from(raw as i32).ok(),
            Width::Size => (raw as i64 >= 0).then_some(raw),
        }
    }

    /// Number of bytes, or `None` to pass a pointer that faults. If the count is refused, the bytes
    /// before the first element are sent all the same, since the kernel reads them first.
    pub(crate) fn bytes(&self, args: &[u64; 6]) -> Option<u64> {
        match self.raw(args).filter(|&raw| raw <= self.max) {
            Some(raw) => raw.checked_mul(self.size.into())?.checked_add(self.add.into()),
            None => (self.over_limit == OverLimit::Refused && self.add > 0).then(|| self.add.into()),
        }
    }
}

impl EmbeddedLen {
    /// Number of bytes, or `None` to pass a pointer that faults.
    pub(crate) fn bytes(&self, number: u32) -> Option<u64> {
        let number = if number == 0 { self.zero } else { number };
        let bytes = u64::from(number) * u64::from(self.unit) + u64::from(self.add);
        let bytes = if bytes > self.max.into() { self.beyond.into() } else { bytes };
        // The kernel reads the number even if the length ends before it, so home needs it.
        (bytes > 0).then_some(bytes.max(u64::from(self.at) + 4))
    }
}

impl Shape {
    /// The length of a plain buffer.
    pub(crate) fn len(&self) -> Option<&Len> {
        match self {
            Self::In(len) | Self::InOut(len) | Self::Rewritten(len) | Self::Out(len, ..) => Some(len),
            _ => None,
        }
    }

    /// For a [`Shape::Length`]: the length to send. The kernel refuses a negative one itself.
    pub(crate) fn carried(&self, length: u32) -> Option<u32> {
        match self {
            Self::Length { signed: true, .. } if (length as i32) < 0 => Some(length),
            Self::Length { max, .. } => Some(length.min(*max)),
            _ => None,
        }
    }

    /// For a [`Shape::Length`]: the size of the buffer for this length.
    pub(crate) fn buffer_size(&self, length: u32) -> Option<u64> {
        let carried = self.carried(length)?;
        Some(if carried as i32 >= 0 { carried.into() } else { 0 })
    }
}

impl Len {
    /// Number of bytes if the arguments determine it; `None` if it depends on memory, or for an
    /// invalid count.
    pub(crate) fn by_args(&self, args: &[u64; 6]) -> Option<u64> {
        match self {
            Self::Fixed(len) => Some((*len).into()),
            Self::Arg(count) => count.bytes(args),
            Self::Bits(arg) => {
                let bits = u64::try_from(args[usize::from(*arg)] as i32).ok()?;
                (bits <= crate::limits::MAX_DESCRIPTORS).then(|| bits.div_ceil(64) * 8)
            }
            Self::Of(len) => Some(len(args).into()),
            Self::Pointed(_) | Self::Embedded(_) => None,
        }
    }

    /// The index of the argument that must be lowered for this length, if any, and its new value.
    pub(crate) fn lowered_arg(&self, args: &[u64; 6]) -> Option<(usize, u64)> {
        match self {
            Self::Arg(count) if count.over_limit == OverLimit::Cut => {
                count.raw(args).filter(|&raw| raw > count.max).map(|_| (count.arg.into(), count.max))
            }
            Self::Bits(arg) => {
                let bits = u64::try_from(args[usize::from(*arg)] as i32).ok()?;
                (bits > crate::limits::MAX_DESCRIPTORS)
                    .then_some((usize::from(*arg), crate::limits::MAX_DESCRIPTORS))
            }
            _ => None,
        }
    }
}

impl fmt::Display for Len {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(len) => write!(f, "{len} bytes"),
            Self::Arg(count) => {
                if count.add != 0 {
                    write!(f, "{} + ", count.add)?;
                }
                match count.size {
                    1 => write!(f, "argument {} bytes", count.arg + 1)?,
                    size => write!(f, "argument {} × {size} bytes", count.arg + 1)?,
                }
                match count.over_limit {
                    OverLimit::Cut => write!(f, ", cut at {}", count.max),
                    OverLimit::Refused => Ok(()),
                }
            }
            Self::Bits(arg) => write!(f, "argument {} bits", arg + 1),
            Self::Pointed(arg) => write!(f, "as many bytes as argument {} points to", arg + 1),
            Self::Embedded(embedded) => write!(f, "sized by its own number at {}", embedded.at),
            Self::Of(_) => f.write_str("sized by the arguments"),
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value => f.write_str("value"),
            Self::Fd => f.write_str("fd"),
            Self::Text(max) => write!(f, "text ≤ {max}"),
            Self::Page => f.write_str("in: up to a page"),
            Self::In(len) => write!(f, "in: {len}"),
            Self::InOut(len) | Self::Rewritten(len) => write!(f, "in-out: {len}"),
            Self::TimeLeft(len) => write!(f, "in-out: {len} bytes of time left"),
            Self::Out(len, amount, when) => {
                write!(f, "out: {len}")?;
                match amount {
                    Amount::Whole => Ok(()),
                    Amount::Result { size: 1, add: 0 } | Amount::Padded => f.write_str("; result bytes"),
                    Amount::Result { size, add: 0 } => write!(f, "; result × {size}"),
                    Amount::Result { size, add } => write!(f, "; {add} + result × {size}"),
                    Amount::Pointed(_) => f.write_str("; as the length says"),
                    Amount::SelfSized => f.write_str("; as its first number says"),
                }?;
                match when {
                    When::AtLeast(0) => Ok(()),
                    When::AtLeast(least) => write!(f, ", when the result is at least {least}"),
                    When::Interrupted => f.write_str(", when interrupted"),
                }
            }
            Self::Length { max, .. } => write!(f, "in-out: length ≤ {max}"),
            Self::Segments(Direction::Send, arg) => write!(f, "in: argument {} segments", arg + 1),
            Self::Segments(Direction::Receive, arg) => write!(f, "out: argument {} segments", arg + 1),
            Self::Messages(Direction::Send, None) => f.write_str("in: message"),
            Self::Messages(Direction::Receive, None) => f.write_str("out: message"),
            Self::Messages(Direction::Send, Some(arg)) => write!(f, "in: argument {} messages", arg + 1),
            Self::Messages(Direction::Receive, Some(arg)) => write!(f, "out: argument {} messages", arg + 1),
            Self::Strings => f.write_str("in: strings"),
            Self::MaskPair => f.write_str("in: signal mask with its size"),
        }
    }
}
