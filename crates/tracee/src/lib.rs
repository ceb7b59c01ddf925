//! tracee
