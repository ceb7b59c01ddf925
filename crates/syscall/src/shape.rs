//! What an argument is: how many bytes lie behind a pointer, which way they go, and which of them the kernel
//! has written when the call returned.

use std::fmt;

/// The shape of one argument. NULL is allowed everywhere: it stays NULL and the kernel judges it.
#[derive(Debug, Clone, Copy)]
pub enum Shape {
    /// A number; passed as it is.
    Value,
    /// A descriptor (or AT_FDCWD); passed as it is, since it is the deputy's.
    Fd,
    /// Text up to a NUL, at most so many bytes with it.
    Text(u32),
    /// Up to a page of anything: what can be read of it (mount's data).
    Page,
    /// The kernel reads.
    In(Len),
    /// The kernel reads and may write; written back where it changed.
    InOut(Len),
    /// The time left of a timeout, so many bytes; written back as far as possible, since programs may keep
    /// it in read-only memory and the kernel forgives that.
    TimeLeft(u32),
    /// The kernel writes.
    Out(Len, Amount, When),
    /// Where a buffer's length is read from and its true length is written to: an int, cut to `max`.
    Length {
        /// No more room than this is made for the buffer.
        max: u32,
        /// A negative length is passed on for the kernel to refuse.
        signed: bool,
    },
    /// An iovec array with as many entries as that argument says.
    Segments(Way, u8),
    /// One struct msghdr, or as many struct mmsghdr as that argument says.
    Messages(Way, Option<u8>),
    /// A NULL-terminated array of strings (argv, envp).
    Strings,
    /// pselect6's last: a pointer to a signal mask, and its size.
    MaskPair,
}

/// Which way data goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From the guest.
    Send,
    /// To the guest.
    Receive,
}

/// How many bytes lie behind a pointer.
#[derive(Debug, Clone, Copy)]
pub enum Len {
    /// Always so many.
    Fixed(u32),
    /// An argument counts them.
    Arg(Count),
    /// One bit for each descriptor below that argument, in 64-bit words (fd_set).
    Bits(u8),
    /// The number behind that argument, a [`Shape::Length`].
    Pointed(u8),
    /// A number in the struct itself says.
    Inside(Inside),
    /// From the arguments, in a way of its own.
    Of(fn(&[u64; 6]) -> u32),
}

/// A length that an argument states: `argument × size + add` bytes.
#[derive(Debug, Clone, Copy)]
pub struct Count {
    /// The argument.
    pub arg: u8,
    /// How the kernel reads it.
    pub width: Width,
    /// Bytes of an element.
    pub size: u32,
    /// Bytes before the first element.
    pub add: u32,
    /// The highest argument that is carried.
    pub max: u64,
    /// What a higher one means.
    pub over: Over,
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

/// What becomes of a count above the maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// It is lowered: the kernel may do less than was asked of it.
    Cut,
    /// It stays, with a pointer that faults: the kernel refuses such a count before it looks at the memory.
    Refused,
}

/// A length that a 32-bit number inside the struct states: `number × unit + add` bytes, at most `max`.
#[derive(Debug, Clone, Copy)]
pub struct Inside {
    /// Where the number is.
    pub at: u32,
    /// Bytes for each.
    pub unit: u32,
    /// Bytes besides.
    pub add: u32,
    /// What a zero stands for.
    pub zero: u32,
    /// Most bytes.
    pub max: u32,
    /// The bytes that travel when there would be more, since the kernel refuses the number once it has read
    /// these; 0 where it might not, and gets a pointer that faults instead.
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
    /// As the number behind that argument, a [`Shape::Length`], says afterwards.
    Pointed(u8),
    /// As the 32-bit number at the output's own start says.
    Itself,
}

/// When the kernel has written an output.
#[derive(Debug, Clone, Copy)]
pub enum When {
    /// The result is at least this.
    AtLeast(i64),
    /// The call was interrupted: -EINTR, or the kernel's own ERESTART_RESTARTBLOCK.
    Interrupted,
}

impl Count {
    /// The argument as the kernel reads it; `None` when it is negative, which the kernel refuses.
    pub(crate) fn raw(&self, args: &[u64; 6]) -> Option<u64> {
        let raw = args[usize::from(self.arg)];
        match self.width {
            Width::UInt => Some(raw & 0xffff_ffff),
            Width::Int => u64::try_from(raw as i32).ok(),
            Width::Size => (raw as i64 >= 0).then_some(raw),
        }
    }

    /// Bytes, or `None` when the pointer is passed on as one that faults. Of a count that is refused,
    /// the bytes before the first element still travel: the kernel reads them first.
    pub(crate) fn bytes(&self, args: &[u64; 6]) -> Option<u64> {
        match self.raw(args).filter(|&raw| raw <= self.max) {
            Some(raw) => raw.checked_mul(self.size.into())?.checked_add(self.add.into()),
            None => (self.over == Over::Refused && self.add > 0).then(|| self.add.into()),
        }
    }
}

impl Inside {
    /// Bytes, or `None` when the pointer is passed on as one that faults.
    pub(crate) fn bytes(&self, number: u32) -> Option<u64> {
        let number = if number == 0 { self.zero } else { number };
        let bytes = u64::from(number) * u64::from(self.unit) + u64::from(self.add);
        let bytes = if bytes > self.max.into() { self.beyond.into() } else { bytes };
        // However few they are to be, the kernel reads the number first, and so must home.
        (bytes > 0).then_some(bytes.max(u64::from(self.at) + 4))
    }
}

impl Shape {
    /// The length of a plain buffer.
    pub(crate) fn len(&self) -> Option<&Len> {
        match self {
            Self::In(len) | Self::InOut(len) | Self::Out(len, ..) => Some(len),
            _ => None,
        }
    }

    /// For a [`Shape::Length`]: what travels of this length. A negative one is the kernel's to refuse.
    pub(crate) fn carried(&self, length: u32) -> Option<u32> {
        match self {
            Self::Length { signed: true, .. } if (length as i32) < 0 => Some(length),
            Self::Length { max, .. } => Some(length.min(*max)),
            _ => None,
        }
    }

    /// For a [`Shape::Length`]: the room that the buffer of this length gets.
    pub(crate) fn room(&self, length: u32) -> Option<u64> {
        let carried = self.carried(length)?;
        Some(if carried as i32 >= 0 { carried.into() } else { 0 })
    }
}

impl Len {
    /// Bytes, where the arguments alone tell; `None` where the memory must be asked, or for a bad count.
    pub(crate) fn by_args(&self, args: &[u64; 6]) -> Option<u64> {
        match self {
            Self::Fixed(len) => Some((*len).into()),
            Self::Arg(count) => count.bytes(args),
            Self::Bits(arg) => {
                let bits = u64::try_from(args[usize::from(*arg)] as i32).ok()?;
                (bits <= crate::limits::DESCRIPTORS).then(|| bits.div_ceil(64) * 8)
            }
            Self::Of(len) => Some(len(args).into()),
            Self::Pointed(_) | Self::Inside(_) => None,
        }
    }

    /// The lowered argument, where this length lowers one.
    pub(crate) fn cut(&self, args: &[u64; 6]) -> Option<(usize, u64)> {
        match self {
            Self::Arg(count) if count.over == Over::Cut => {
                count.raw(args).filter(|&raw| raw > count.max).map(|_| (count.arg.into(), count.max))
            }
            Self::Bits(arg) => {
                let bits = u64::try_from(args[usize::from(*arg)] as i32).ok()?;
                (bits > crate::limits::DESCRIPTORS).then_some((usize::from(*arg), crate::limits::DESCRIPTORS))
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
                match count.over {
                    Over::Cut => write!(f, ", cut at {}", count.max),
                    Over::Refused => Ok(()),
                }
            }
            Self::Bits(arg) => write!(f, "argument {} bits", arg + 1),
            Self::Pointed(arg) => write!(f, "as many bytes as argument {} points to", arg + 1),
            Self::Inside(inside) => write!(f, "sized by its own number at {}", inside.at),
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
            Self::InOut(len) => write!(f, "in-out: {len}"),
            Self::TimeLeft(len) => write!(f, "in-out: {len} bytes of time left"),
            Self::Out(len, amount, when) => {
                write!(f, "out: {len}")?;
                match amount {
                    Amount::Whole => Ok(()),
                    Amount::Result { size: 1, add: 0 } => f.write_str("; result bytes"),
                    Amount::Result { size, add: 0 } => write!(f, "; result × {size}"),
                    Amount::Result { size, add } => write!(f, "; {add} + result × {size}"),
                    Amount::Pointed(_) => f.write_str("; as the length says"),
                    Amount::Itself => f.write_str("; as its first number says"),
                }?;
                match when {
                    When::AtLeast(0) => Ok(()),
                    When::AtLeast(least) => write!(f, ", when the result is at least {least}"),
                    When::Interrupted => f.write_str(", when interrupted"),
                }
            }
            Self::Length { max, .. } => write!(f, "in-out: length ≤ {max}"),
            Self::Segments(Way::Send, arg) => write!(f, "in: argument {} segments", arg + 1),
            Self::Segments(Way::Receive, arg) => write!(f, "out: argument {} segments", arg + 1),
            Self::Messages(Way::Send, None) => f.write_str("in: message"),
            Self::Messages(Way::Receive, None) => f.write_str("out: message"),
            Self::Messages(Way::Send, Some(arg)) => write!(f, "in: argument {} messages", arg + 1),
            Self::Messages(Way::Receive, Some(arg)) => write!(f, "out: argument {} messages", arg + 1),
            Self::Strings => f.write_str("in: strings"),
            Self::MaskPair => f.write_str("in: signal mask with its size"),
        }
    }
}
