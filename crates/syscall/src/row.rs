//! One row of the table, and the macro that lets a file of rows read like one.

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
    /// What its arguments are.
    pub arguments: Arguments,
    /// Why it runs there, in one sentence.
    pub note: &'static str,
    /// How it waits; `None` when it does not sleep for long.
    pub wait: Option<Wait>,
    /// The argument that carries a signal mask for the time of the call.
    pub mask: Option<u8>,
    /// What it has read is gone: outputs are probed before the call is made.
    pub consumes: bool,
    /// It moves data, and a count cut short by an interruption is continued by its caller.
    pub flow: Option<Flow>,
}

/// The shapes of a row's arguments.
#[derive(Debug, Clone, Copy)]
pub enum Arguments {
    /// Always these; those that are missing are ignored by the kernel.
    Fixed(&'static [Shape]),
    /// As other arguments say. The words are for people.
    By(fn(&[u64; 6]) -> &'static [Shape], &'static str),
}

/// How a call waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// What an interruption without a signal (a freeze, an ignored signal) makes of it.
    pub interrupted: Interrupted,
    /// Where its timeout is.
    pub timeout: Timeout,
}

/// What the kernel answers to a waiting call that was interrupted and has no signal to deliver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interrupted {
    /// ERESTARTSYS, ERESTARTNOINTR or ERESTARTNOHAND: the same call is made again.
    Restarts,
    /// With a timeout, ERESTART_RESTARTBLOCK: restart_syscall continues it; without one, as `Restarts`.
    RestartBlock,
    /// Plain EINTR: whoever interrupted it must make it again.
    Eintr,
    /// Plain EINTR if SO_RCVTIMEO or SO_SNDTIMEO is set on the socket, else as `Restarts`.
    EintrIfSocketTimeout,
}

/// Where a call's timeout is. Arguments are counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timeout {
    /// Nowhere.
    None,
    /// That argument, in milliseconds as an int; negative is for ever.
    Millis(u8),
    /// A struct timespec behind that argument; NULL is for ever.
    Timespec(u8),
    /// The same, but the kernel itself writes the time left to it.
    TimeLeft(u8),
    /// A point in time, which needs no correction.
    Absolute(u8),
}

/// Which way a stream's data goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// A blocking write returns less only when it was interrupted (or the peer is gone).
    Write,
    /// A read with MSG_WAITALL does.
    Read,
    /// From one descriptor to another; that argument is the count.
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
        self.wait = Some(Wait { interrupted, timeout });
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

    /// The shapes of these arguments.
    #[must_use]
    pub fn shapes(&self, args: &[u64; 6]) -> &'static [Shape] {
        match self.arguments {
            Arguments::Fixed(shapes) => shapes,
            Arguments::By(by, _) => by(args),
        }
    }

    /// Which of these arguments are descriptors.
    pub fn fd_args(&self, args: &[u64; 6]) -> impl Iterator<Item = usize> {
        self.shapes(args).iter().enumerate().filter(|(_, s)| matches!(s, Shape::Fd)).map(|(i, _)| i)
    }
}

/// `NUMBER name RULE [shapes] {properties} "note";` for each call. In place of `[shapes]`, `(by function,
/// "words")` chooses them by the arguments.
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
