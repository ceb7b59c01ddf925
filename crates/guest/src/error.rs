//! Errors of calls and messages.

/// The result of handling a call or a message.
pub(crate) type GuestResult<T = ()> = std::result::Result<T, GuestError>;

/// Why a call or a message could not be handled.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GuestError {
    /// The guest is gone or inconsistent; it is to be ended.
    #[error(transparent)]
    Process(#[from] tern_tracee::Error),
    /// The process cannot come here.
    #[error(transparent)]
    Unmovable(#[from] tern_image::Unmovable),
    /// Home is unreachable; pending calls are sent again on the next link.
    #[error(transparent)]
    Link(#[from] tern_wire::LinkError),
}

impl From<std::io::Error> for GuestError {
    fn from(error: std::io::Error) -> Self {
        Self::Link(error.into())
    }
}
