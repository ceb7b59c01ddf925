//! Abbreviations used in the rows.

pub(super) use crate::limits;
pub(super) use crate::route::{ArgTest, Route, Rule, SplitCall, reason};
pub(super) use crate::row::{Flow, Interrupted, Timeout, rows};
pub(super) use crate::shape::{Amount, Count, Direction, EmbeddedLen, Len, OverLimit, Shape, When, Width};

pub(super) const HERE: Rule = Rule::Always(Route::Here);
pub(super) const HOME: Rule = Rule::Always(Route::Home);
pub(super) const NOSYS: Rule = Rule::Always(Route::Refuse(libc::ENOSYS));

pub(super) const fn homeward(reason: &'static str) -> Rule {
    Rule::Always(Route::Homeward(reason))
}

pub(super) const fn both(split_call: SplitCall) -> Rule {
    Rule::Always(Route::Both(split_call))
}

/// A number that the kernel does not dereference.
pub(super) const V: Shape = Shape::Value;
/// A descriptor, or AT_FDCWD.
pub(super) const FD: Shape = Shape::Fd;
/// A path, or other text that the kernel takes with getname().
pub(super) const PATH: Shape = Shape::Text(limits::MAX_PATH);
/// The name of an extended attribute (XATTR_NAME_MAX + 1).
pub(super) const ATTRIBUTE: Shape = Shape::Text(256);

/// The kernel reads this many bytes.
pub(super) const fn input(len: u32) -> Shape {
    Shape::In(Len::Fixed(len))
}

/// The kernel writes this many bytes if it succeeds.
pub(super) const fn output(len: u32) -> Shape {
    Shape::Out(Len::Fixed(len), Amount::Whole, When::AtLeast(0))
}

/// The kernel reads this many bytes, and writes some of them.
pub(super) const fn inout(len: u32) -> Shape {
    Shape::InOut(Len::Fixed(len))
}

/// Data that the kernel reads, with its length in that argument.
pub(super) const fn data_in(arg: u8) -> Shape {
    Shape::In(counted(arg, Width::Size, 1, limits::MAX_DATA, OverLimit::Cut))
}

/// Data that the kernel writes, with the buffer's length in that argument; the result is the number
/// of bytes written.
pub(super) const fn data_out(arg: u8) -> Shape {
    filled(counted(arg, Width::Size, 1, limits::MAX_DATA, OverLimit::Cut), 1)
}

/// The result is the number of elements, of this size, that the kernel has written.
pub(super) const fn filled(len: Len, size: u32) -> Shape {
    Shape::Out(len, Amount::Result { size, add: 0 }, When::AtLeast(0))
}

/// A length of `args[arg] × size`.
pub(super) const fn counted(arg: u8, width: Width, size: u32, max: u64, over_limit: OverLimit) -> Len {
    Len::Arg(Count { arg, width, size, add: 0, max, over_limit })
}

/// A struct with its length in that argument. The kernel refuses lengths above `max`.
pub(super) const fn struct_in(arg: u8, width: Width, max: u64) -> Shape {
    Shape::In(counted(arg, width, 1, max, OverLimit::Refused))
}

/// As [`struct_in`], and the kernel may write to the struct.
pub(super) const fn struct_inout(arg: u8, width: Width, max: u64) -> Shape {
    Shape::InOut(counted(arg, width, 1, max, OverLimit::Refused))
}

/// The size of a libc struct that has the kernel's layout.
pub(super) const fn size<T>() -> u32 {
    size_of::<T>() as u32
}

/// A struct timespec or timeval, or half of an itimerval: two 64-bit numbers.
pub(super) const PAIR: u32 = 16;
/// A struct sigset_t of the kernel.
pub(super) const SIGSET: u32 = 8;
/// A siginfo_t.
pub(super) const SIGINFO: u32 = 128;

pub(super) const AT_THE_DEPUTY: &str = "The descriptor is the deputy's.";
pub(super) const NAMES: &str =
    "Names are looked up in home's file tree, from the deputy's working directory.";
pub(super) const IDENTITY: &str = "Credentials are the deputy's.";
pub(super) const NEVER: &str = "Not implemented by the kernel on x86-64.";
