//! The few words that rows are written in.

pub(super) use crate::limits;
pub(super) use crate::route::{Route, Rule, Special, Test, reason};
pub(super) use crate::row::{Flow, Interrupted, Timeout, rows};
pub(super) use crate::shape::{Amount, Count, Inside, Len, Over, Shape, Way, When, Width};

pub(super) const HERE: Rule = Rule::Always(Route::Here);
pub(super) const HOME: Rule = Rule::Always(Route::Home);
pub(super) const NOSYS: Rule = Rule::Always(Route::Refuse(libc::ENOSYS));

pub(super) const fn away(reason: &'static str) -> Rule {
    Rule::Always(Route::Homeward(reason))
}

pub(super) const fn both(special: Special) -> Rule {
    Rule::Always(Route::Both(special))
}

/// A number that the kernel does not dereference.
pub(super) const V: Shape = Shape::Value;
/// A descriptor, or AT_FDCWD.
pub(super) const FD: Shape = Shape::Fd;
/// A path, or other text that the kernel takes with getname().
pub(super) const PATH: Shape = Shape::Text(limits::PATH);
/// The name of an extended attribute (XATTR_NAME_MAX + 1).
pub(super) const ATTRIBUTE: Shape = Shape::Text(256);

/// The kernel reads so many bytes.
pub(super) const fn input(len: u32) -> Shape {
    Shape::In(Len::Fixed(len))
}

/// The kernel writes so many bytes when it succeeds.
pub(super) const fn output(len: u32) -> Shape {
    Shape::Out(Len::Fixed(len), Amount::Whole, When::AtLeast(0))
}

/// The kernel reads so many bytes, and writes some of them.
pub(super) const fn inout(len: u32) -> Shape {
    Shape::InOut(Len::Fixed(len))
}

/// Data that the kernel reads, as long as that argument says.
pub(super) const fn data_in(arg: u8) -> Shape {
    Shape::In(counted(arg, Width::Size, 1, limits::PAYLOAD, Over::Cut))
}

/// Data that the kernel writes, with room as that argument says; the result tells how much it is.
pub(super) const fn data_out(arg: u8) -> Shape {
    filled(counted(arg, Width::Size, 1, limits::PAYLOAD, Over::Cut), 1)
}

/// The result counts the elements of this size that the kernel has written.
pub(super) const fn filled(len: Len, size: u32) -> Shape {
    Shape::Out(len, Amount::Result { size, add: 0 }, When::AtLeast(0))
}

/// A length of `args[arg] × size`.
pub(super) const fn counted(arg: u8, width: Width, size: u32, max: u64, over: Over) -> Len {
    Len::Arg(Count { arg, width, size, add: 0, max, over })
}

/// A struct that is as long as that argument says, which the kernel refuses above `max`.
pub(super) const fn struct_in(arg: u8, width: Width, max: u64) -> Shape {
    Shape::In(counted(arg, width, 1, max, Over::Refused))
}

/// The same, and the kernel may write to it.
pub(super) const fn struct_inout(arg: u8, width: Width, max: u64) -> Shape {
    Shape::InOut(counted(arg, width, 1, max, Over::Refused))
}

/// The size of a libc struct, where it is the kernel's too.
pub(super) const fn size<T>() -> u32 {
    size_of::<T>() as u32
}

/// A struct timespec, timeval × ½, itimerval × ½: two 64-bit numbers.
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
