//! How ternd starts a shim, and the requests that a shim serves.

use crate::report::{ConnectionRow, MigrationReport, PathRow, PlacedRow, ProcessRow, Refusal};
use crate::request::{Destination, Lock};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use tern_ids::{
    ConnectionToken, Credentials, Epoch, Fingerprint, HomePid, MigrationId, NodeId, SharedFile, ShimId,
};

/// The start-up data of a shim. ternd writes it as one JSON document to the new shim's standard
/// input, and closes the pipe. The shim listens at `run_dir/shims/ID.sock`, writes one line to its
/// standard output, and closes the pipe. The line is `ready FINGERPRINT` (64 hexadecimal digits:
/// the SHA-256 of its ephemeral certificate) or `failed REASON`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ShimStart {
    /// Its id, which names its control socket.
    pub id: ShimId,
    /// The node that it runs on.
    pub node: NodeId,
    /// The node's run directory.
    pub run_dir: PathBuf,
    /// The node's cache of file content.
    pub cache_dir: PathBuf,
    /// Which half of a family it holds.
    pub role: ShimRole,
    /// Seconds without a link to its home after which a guest is suspended.
    pub suspend_after: u32,
    /// Seconds after which home declares a lost guest dead.
    pub give_up_after: u32,
    /// Niceness of guests: 0 to 19.
    pub guest_nice: u8,
    /// Whether frequent file calls of guests are made by patched call sites, without a trap.
    #[serde(alias = "hot_calls")]
    pub fastpath: bool,
    /// Maximum number of CPUs that all guests of the node use together; `None`: no limit.
    pub guest_cpus: Option<f64>,
    /// Directories of file systems that the nodes share (`shared` in `ternd.toml`).
    pub shared: Vec<PathBuf>,
    /// Whether all of this node's files are available to the other nodes (`mfs` and `mfs_paths` in
    /// `ternd.toml`, `mosctl nomfs`).
    pub serves_files: bool,
    /// Whether files that own processes map shared away become shared memory there.
    pub shares_files: bool,
}

/// The socket of the file tree from which guests, on the node with this run directory, map files of
/// `home`. It serves [`ShimRequest::MapRoot`].
#[must_use]
pub fn remote_map_socket(run_dir: &Path, home: NodeId) -> PathBuf {
    run_dir.join(format!("home{home}.sock"))
}

/// The control socket of tern-net, on the node with this run directory.
#[must_use]
pub fn net_socket(run_dir: &Path) -> PathBuf {
    run_dir.join("net.sock")
}

/// The rights at home that a process may have to be moved to another node. Ordered: each value
/// includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RightsLimit {
    /// No more than its user has. The user is not root.
    User,
    /// The rights of root, if the process is root's.
    Root,
    /// All rights. Root has requested the move of this process.
    Any,
}

/// The half of a family that a shim holds.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShimRole {
    /// The home half of the family that begins with this process. The first request to the shim
    /// says what to do with the process.
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
        /// The keys of the connections that it accepts. The first is home's.
        accepted_keys: Vec<Fingerprint>,
        /// The user id of its guests on this node.
        uid: u32,
        /// Their group id.
        gid: u32,
    },
}

/// A request to a shim.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShimRequest {
    /// List the shim's processes.
    Processes,
    /// List the network sockets of the shim's processes that are away, or the connections of its
    /// guests that are on this node. (`Connections`.)
    Connections,
    /// Whether the shim holds this process. (`Done`, or `Refused` with `NotFound`.)
    Owns {
        /// The process.
        pid: HomePid,
    },
    /// Whether home still waits for a guest of this epoch: the epoch is the current one or may
    /// become the current one. Deputy only. (`Done`, or `Refused` with `NotFound`: the guest must
    /// end.)
    #[serde(rename = "awaits")]
    IsGuestAwaited {
        /// The process.
        pid: HomePid,
        /// The epoch.
        epoch: Epoch,
    },
    /// Move a process. Deputy only. ternd has checked the caller's right.
    Migrate {
        /// The process.
        pid: HomePid,
        /// The destination; never `Balance`.
        to: Destination,
        /// The rights with which it may leave home.
        rights: RightsLimit,
    },
    /// Let a frozen process continue. Deputy only. ternd has checked the caller's right.
    Continue {
        /// The process.
        pid: HomePid,
    },
    /// Hold this process until it has called execve, then move it. Deputy only. Answered when the
    /// process is held and a destination is prepared.
    AtExec {
        /// The process.
        pid: HomePid,
        /// Nodes to try, in this order.
        candidates: Vec<NodeId>,
        /// Whether the cluster may move it afterwards.
        lock: Lock,
        /// The rights with which its program may leave home.
        rights: RightsLimit,
    },
    /// Kill all guests. Guest only. (`Done`: they are gone, and home was notified.)
    End {
        /// The reason, as one sentence for the user.
        why: String,
    },
    /// A node is no longer a member of the cluster. A guest shim of that home kills its guests and ends; a
    /// deputy kills the processes that are on that node. (`Done`.)
    NodeRemoved {
        /// The node.
        node: NodeId,
    },
    /// Open a file of this node for a guest. Served by the node's file server only, requested by
    /// shims. (`Done`, then a byte with the descriptor. The file counts as open until the socket is
    /// closed.)
    OpenFile {
        /// The path, without symbolic links.
        path: Vec<u8>,
        /// Its inode number in MFS. A file with another number is not opened.
        number: u64,
        /// The credentials to open it with.
        #[serde(rename = "who")]
        credentials: Credentials,
        /// The access mode of open(2).
        flags: u32,
    },
    /// Open a file of a shared file system, for reading, for a guest of this node. Served by the
    /// node's file server only, requested by shims. (`Done`, then a byte with the descriptor.)
    OpenShared {
        /// The directory, which this node must declare as shared too.
        root: Vec<u8>,
        /// The path below it, without symbolic links.
        path: Vec<u8>,
        /// The file as the guest's home sees it. Another file, or another state of it, is not
        /// opened.
        file: SharedFile,
        /// The credentials to open it with.
        #[serde(rename = "who")]
        credentials: Credentials,
    },
    /// The root of the file tree from which guests of this node map files of their home. Requested
    /// by shims. (`Done`, then a byte with its descriptor, which is valid at least until the socket
    /// is closed.)
    #[serde(rename = "tree")]
    MapRoot,
    /// Allow or deny other nodes' access to this node's files. Served by the node's file server
    /// only. (`Done`.)
    #[serde(rename = "files")]
    ServeFiles {
        /// Whether access is allowed.
        open: bool,
    },
    /// Offer the connection of a process that is away to the node of its guest. Served by home's
    /// tern-net only, requested by home's shim, which sends a byte with the socket's descriptor
    /// after the request. (`Done`. The offer ends when the socket of this request is closed.)
    OfferConnection {
        /// The name of the offer.
        token: ConnectionToken,
        /// The node that may take the connection.
        node: NodeId,
    },
    /// Take a connection that home offers. Served by tern-net of the guest's node only, requested by
    /// the guest's shim. (`Done`, then a byte with the descriptor of the connection, which is on this
    /// node then. It is in use until the socket of this request is closed. If the shim has not
    /// returned it before, its program has ended.)
    TakeConnection {
        /// The home of the guest.
        home: NodeId,
        /// The name of the offer.
        token: ConnectionToken,
    },
    /// Return a connection that was taken. Served by tern-net of the guest's node only, requested by
    /// the guest's shim, which sends a byte with its descriptor after the request. No call on it is
    /// in progress. (`Done`: it is at home, and may be taken again. `Refused`: it is still here, or, if
    /// home does not answer, nowhere.)
    ReturnConnection {
        /// The home of the guest.
        home: NodeId,
        /// The name of the offer.
        token: ConnectionToken,
    },
    /// Create a file system for `tern-readiness`. Served by tern-net only, requested by a guest's shim.
    /// (`Done`, then two bytes, each with a descriptor: the FUSE device and the root.)
    CreateReadinessFiles,
    /// Examine the paths to all other nodes of the map, as homes of guests of this one. Takes some
    /// seconds at most. Served by tern-net only. (`Paths`.)
    Paths,
    /// List placed commands: those of this node, and those of others here. Served by the executor
    /// (mexec) only.
    Placed,
    /// A connection from the peer follows on this socket as a file descriptor (SCM_RIGHTS, one byte
    /// of data). Only the preamble has been read from it. The shim authenticates the peer itself.
    Connection,
}

/// A shim's reply.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShimReply {
    /// Not done.
    Refused(Refusal),
    /// Done. No data.
    Done,
    /// Its processes.
    Processes(Vec<ProcessRow>),
    /// To `Connections`.
    Connections(Vec<ConnectionRow>),
    /// To `Paths`.
    Paths(Vec<PathRow>),
    /// To `Placed`.
    Placed(Vec<PlacedRow>),
    /// The process runs on its destination.
    Migrated(MigrationReport),
    /// The process shares memory with `pid`, which another shim holds. Send the request to that
    /// shim.
    HeldWith {
        /// The other process.
        pid: HomePid,
    },
}

#[cfg(test)]
mod tests {
    use tern_ids::Credentials;

    #[test]
    fn credentials_are_a_tuple_in_json() {
        let credentials = Credentials { uid: 1, gid: 2, groups: vec![3] };
        let text = serde_json::to_string(&credentials).unwrap();
        assert_eq!(text, "[1,2,[3]]");
        assert_eq!(serde_json::from_str::<Credentials>(&text).unwrap(), credentials);
    }
}
