//! The reasons why a process cannot be moved.

use crate::process::MAX_THREADS;
use serde::{Deserialize, Serialize};

/// The reason why a process cannot be moved. Its text is a code, which scripts look for, and a
/// sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[allow(missing_docs, reason = "each variant's message says what it is")]
pub enum Unmovable {
    #[error("shared memory: it maps {0:?} writable and shared")]
    SharedMemory(String),
    /// Why it cannot leave with the processes with which it shares memory: a sentence.
    #[error("shared memory: {0}")]
    SharedWith(String),
    #[error("threads: it has {0}, and at most {MAX_THREADS} are moved")]
    Threads(u32),
    #[error("device mapping: it maps {0:?}")]
    DeviceMapping(String),
    #[error("huge pages: it uses hugetlb memory")]
    HugePages,
    #[error("sealed memory: it has sealed memory (mseal), which cannot be unmapped")]
    SealedMemory,
    #[error("shadow stack: it runs with a hardware shadow stack")]
    ShadowStack,
    #[error("userfaultfd: it handles its own page faults")]
    Userfaultfd,
    #[error("special mapping: it maps {0:?}, which exists only on this node")]
    SpecialMapping(String),
    #[error("no vDSO: it has unmapped the kernel's vDSO, from which Tern makes calls in it")]
    NoVdso,
    #[error("file: the mapped file {0:?} cannot be read")]
    UnreadableFile(String),
    #[error("lease: a process has a write lease on the mapped file {0:?}")]
    Leased(String),
    #[error("traced: process {0} is tracing it")]
    Traced(i32),
    #[error("32-bit: it runs 32-bit code")]
    ThirtyTwoBit,
    #[error("seccomp: it has its own seccomp filter")]
    Seccomp,
    /// Has a sentence without its subject, which names the rights.
    #[error("rights: it {0}")]
    Rights(&'static str),
    #[error("CPU mode: it {0}")]
    CpuMode(String),
    #[error("shared address space: it shares its memory with process {0} (vfork or clone)")]
    SharedAddressSpace(i32),
    #[error("special descriptor: it holds an {0}")]
    SpecialDescriptor(String),
    #[error("no memory: it is a kernel thread, or exiting")]
    NoMemory,
    #[error("init: it is the first process of its namespace")]
    Init,
    #[error("pid: its pid {0} in its own namespace is in use on that node, or above that node's maximum")]
    Pid(i32),
    #[error("busy: the kernel does not answer questions about it, maybe because of a file server; try again")]
    Unanswered,
    #[error("pid: its children start in another pid namespace")]
    ChildrenElsewhere,
}

impl Unmovable {
    /// The code: the text before the colon.
    #[must_use]
    pub fn code(&self) -> String {
        let text = self.to_string();
        text.split(':').next().unwrap_or_default().to_owned()
    }
}
