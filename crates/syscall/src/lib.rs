//! syscall
