//! A row of the table, and the macro for files of rows.

use crate::route::Rule;
use crate::shape::Shape;

/// A system call.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Its x86-64 number.
    pub nr: u32,
    /// Its name, as in `unistd_64.h`.
    pub name: &'static str,
    /// Where it runs.
    pub rule: Rule,
    /// Its arguments.
    pub arguments: Arguments,
    /// Why it runs there, in one sentence.
    pub note: &'static str,
    /// How it waits; `None` if it does not sleep for long.
    pub wait: Option<WaitRule>,
    /// The argument with a signal mask that is in force during the call.
    pub mask: Option<u8>,
    /// Outputs are probed before the call is made: data that it reads is removed from its source, or
    /// it ends before a segment whose memory is bad.
    pub consumes: bool,
    /// How its data flows, if [`gather_after`](crate::gather_after) can gather its remainder after
    /// a part was transferred.
    pub flow: Option<Flow>,
}

/// The shapes of a row's arguments.
#[derive(Debug, Clone, Copy)]
pub enum Arguments {
    /// Always these shapes. The kernel ignores arguments that are missing here.
    Fixed(&'static [Shape]),
    /// Depends on other arguments. The text describes this in the documentation.
    By(fn(&[u64; 6]) -> &'static [Shape], &'static str),
}

/// How a call waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitRule {
    /// The effect of an interruption without a signal to deliver (a freeze, an ignored signal).
    pub interrupted: Interrupted,
    /// Its timeout.
    pub timeout: Timeout,
}

/// The kernel's result for a waiting call that was interrupted without a signal to deliver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interrupted {
    /// ERESTARTSYS, ERESTARTNOINTR or ERESTARTNOHAND: the same call is made again.
    Restarts,
    /// With a timeout, ERESTART_RESTARTBLOCK: restart_syscall continues it; without one, as
    /// `Restarts`.
    RestartBlock,
    /// Plain EINTR: the caller must repeat the call.
    Eintr,
    /// Plain EINTR if SO_RCVTIMEO or SO_SNDTIMEO is set on the socket, otherwise as `Restarts`.
    EintrIfSocketTimeout,
}

/// The timeout argument of a call. Arguments are counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timeout {
    /// No timeout.
    None,
    /// In that argument, in milliseconds as an int; negative means no timeout.
    Millis(u8),
    /// In a struct timespec that the argument points to; NULL means no timeout.
    Timespec(u8),
    /// In a struct that the argument points to, and to which the kernel writes the remaining time;
    /// NULL means no timeout.
    TimeLeft(u8),
    /// An absolute time, which needs no correction.
    Absolute(u8),
}

/// The direction of a stream's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// A blocking write, which returns a short count only if it was interrupted (or the peer is
    /// gone).
    Write,
    /// A read. With MSG_WAITALL a short count has the same causes as for a write.
    Read,
    /// From one descriptor to another. The number says which argument is the count.
    Between(u8),
}

impl Row {
    pub(crate) const fn new(
        nr: u32,
        name: &'static str,
        rule: Rule,
        arguments: Arguments,
        note: &'static str,
    ) -> Self {
        Self { nr, name, rule, arguments, note, wait: None, mask: None, consumes: false, flow: None }
    }

    pub(crate) const fn waits(mut self, interrupted: Interrupted, timeout: Timeout) -> Self {
        self.wait = Some(WaitRule { interrupted, timeout });
        self
    }

    pub(crate) const fn mask(mut self, arg: u8) -> Self {
        self.mask = Some(arg);
        self
    }

    pub(crate) const fn consumes(mut self) -> Self {
        self.consumes = true;
        self
    }

    pub(crate) const fn flow(mut self, flow: Flow) -> Self {
        self.flow = Some(flow);
        self
    }

    /// The shapes for these arguments.
    #[must_use]
    pub fn shapes(&self, args: &[u64; 6]) -> &'static [Shape] {
        match self.arguments {
            Arguments::Fixed(shapes) => shapes,
            Arguments::By(by, _) => by(args),
        }
    }

    /// Indices of the arguments that are descriptors.
    pub fn fd_args(&self, args: &[u64; 6]) -> impl Iterator<Item = usize> {
        self.shapes(args).iter().enumerate().filter(|(_, s)| matches!(s, Shape::Fd)).map(|(i, _)| i)
    }
}

/// `NUMBER name RULE [shapes] {properties} "note";` for each call. `(by function, "words")` in
/// place of `[shapes]` selects the shapes by the arguments.
macro_rules! rows {
    (@rule ($rule:expr)) => { $rule };
    (@rule $rule:ident) => { $rule };
    (@arguments [$($shape:expr),*]) => { $crate::row::Arguments::Fixed(&[$($shape),*]) };
    (@arguments (by $by:path, $words:literal)) => { $crate::row::Arguments::By($by, $words) };
    ($($nr:literal $name:ident $rule:tt $arguments:tt {$($property:ident($($value:expr),*))*} $note:expr;)*) => {
        pub(super) const ROWS: &[$crate::row::Row] = &[$(
            $crate::row::Row::new($nr, stringify!($name), rows!(@rule $rule), rows!(@arguments $arguments), $note)
                $(.$property($($value),*))*,
        )*];
    };
}
pub(crate) use rows;
