//! How a shim is started, and what its node's daemon asks of it.

use crate::report::{MigrationReport, PlacedRow, ProcessRow, Refusal};
use crate::request::{Destination, Lock};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use tern_ids::{Epoch, Fingerprint, HomePid, MigrationId, NodeId, SharedFile, ShimId};

/// What ternd writes to a new shim's standard input, as one JSON document, then closes it. The shim listens
/// on `run_dir/shims/ID.sock`, then writes one line to its standard output: `ready FINGERPRINT` (64
/// hexadecimal digits: the SHA-256 of its ephemeral certificate), or `failed REASON`, and closes it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ShimStart {
    /// The name it listens under.
    pub id: ShimId,
    /// The node it runs on.
    pub node: NodeId,
    /// The node's run directory.
    pub run_dir: PathBuf,
    /// The node's cache of file content.
    pub cache_dir: PathBuf,
    /// Which half it holds.
    pub role: ShimRole,
    /// Seconds without its home after which a guest freezes itself.
    pub suspend_after: u32,
    /// Seconds after which home gives a lost guest up.
    pub give_up_after: u32,
    /// How nice guests are to the node's own processes: 0 to 19.
    pub guest_nice: u8,
    /// Whether often used calls of guests on their files are made without a stop.
    pub hot_calls: bool,
    /// How many CPUs all guests of the node may use together; `None` is all.
    pub guest_cpus: Option<f64>,
    /// Directories of file systems that the nodes share (`shared` in `ternd.toml`).
    pub shared: Vec<PathBuf>,
    /// Whether the other nodes may have this one's files, all of them (`mfs` and `mfs_paths` in `ternd.toml`, `mosctl nomfs`).
    pub serves_files: bool,
}

/// Where the tree gives its root ([`ShimRequest::Tree`]), from which guests of the node with this run directory map files of this home.
#[must_use]
pub fn homes_door(run_dir: &Path, home: NodeId) -> PathBuf {
    run_dir.join(format!("home{home}.sock"))
}

/// The half a shim holds.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShimRole {
    /// The home half of the family that begins with this process. What to do with it comes as a request.
    Deputy {
        /// The process.
        pid: HomePid,
    },
    /// The away half of a family.
    Guest {
        /// The family's home.
        home: NodeId,
        /// The migration that brings its first member.
        migration: MigrationId,
        /// Whose connections it accepts; the first is home's.
        accept: Vec<Fingerprint>,
        /// The identity that its guests get on this node.
        uid: u32,
        /// Their group.
        gid: u32,
    },
}

/// What ternd asks of a shim.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShimRequest {
    /// The shim's processes.
    Processes,
    /// Is this process one of yours? (`Done`, or `Refused` with `NotFound`.)
    Owns {
        /// The process.
        pid: HomePid,
    },
    /// Does this life of this process run under you, or might it still? Deputy only. (`Done`, or `Refused` with
    /// `NotFound`: it is over.)
    Awaits {
        /// The process.
        pid: HomePid,
        /// The life.
        epoch: Epoch,
    },
    /// Move a process. Deputy only; ternd has checked the caller's right to do so.
    Migrate {
        /// The process.
        pid: HomePid,
        /// Where to; never `Balance`.
        to: Destination,
    },
    /// Let a frozen process go on. Deputy only; ternd has checked the caller's right to do so.
    Continue {
        /// The process.
        pid: HomePid,
    },
    /// Hold this process until it has called execve, then move it. Deputy only. Answered as soon as the
    /// process is held and a destination is prepared.
    AtExec {
        /// The process.
        pid: HomePid,
        /// Nodes to try, in this order.
        candidates: Vec<NodeId>,
        /// May the cluster move it afterwards?
        lock: Lock,
    },
    /// End your guests; why. Guest only. (`Done`: they are gone, and home has been told.)
    End {
        /// One sentence for who misses them.
        why: String,
    },
    /// Open a file of this node for a guest of it. Of the server of the node's files only, and asked by shims. (`Done`, and then a
    /// byte with the descriptor; the file counts as open until the socket is closed.)
    OpenFile {
        /// The path, in bytes, without links.
        path: Vec<u8>,
        /// Its inode number in MFS: another file is not opened.
        number: u64,
        /// For whom: user, group, and his other groups.
        who: (u32, u32, Vec<u32>),
        /// How: an access mode of open(2).
        flags: u32,
    },
    /// Open a file of a file system that the nodes share, for reading, for a guest of this node. Of the server of the node's files only, and asked
    /// by shims. (`Done`, and then a byte with the descriptor.)
    OpenShared {
        /// The directory that this node too declares as shared, in bytes.
        root: Vec<u8>,
        /// The path below it, without links.
        path: Vec<u8>,
        /// As its home sees it: another file, or another state of it, is not opened.
        file: SharedFile,
        /// For whom: user, group, and his other groups.
        who: (u32, u32, Vec<u32>),
    },
    /// The root of the tree from which guests of this node map files of their home; asked by shims. (`Done`, and then a byte with its descriptor; it is
    /// there at least until the socket is closed.)
    Tree,
    /// The file behind one that a tree of all nodes' files has open, which is mounted on this node and asks that itself. Of the server of
    /// the node's files only. (`Done`, and then a byte with a descriptor of `O_PATH`.)
    FileBehind {
        /// The tree's session.
        session: [u8; 16],
        /// The server's number of the open file.
        opened: u64,
    },
    /// To the server of a node's files only: let others at them, or not. (`Done`.)
    Files {
        /// They may.
        open: bool,
    },
    /// To what places commands only: those of this node, and those of others here.
    Placed,
    /// A connection from the peer follows as a file descriptor (SCM_RIGHTS, one byte of data) on this
    /// socket. Nothing has been read from it but the preamble; the shim itself authenticates it.
    Connection,
}

/// What a shim answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShimReply {
    /// Not done.
    Refused(Refusal),
    /// Done.
    Done,
    /// Its processes.
    Processes(Vec<ProcessRow>),
    /// To `Placed`.
    Placed(Vec<PlacedRow>),
    /// Moved.
    Migrated(MigrationReport),
    /// It shares memory with this process, which another shim holds: to be asked of that one.
    HeldWith {
        /// The process.
        pid: HomePid,
    },
}
