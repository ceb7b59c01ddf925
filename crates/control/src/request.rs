//! Requests to the node's daemon, and its replies.

use crate::advice::Advice;
use crate::cluster::ClusterReport;
use crate::costs::{Costs, LinkRow};
use crate::report::{ConnectionRow, MigrationReport, PlacedRow, ProcessRow, Refusal, StatusReport};
use crate::settings::{DecayRates, Evacuation, NodeSettings, Switch};
use crate::symbolic_node::SymbolicNode;
use crate::traffic::FileTraffic;
use crate::why::WhyReport;
use serde::{Deserialize, Serialize};
use tern_ids::{Epoch, Fingerprint, HomePid, MigrationId, NodeId, ShimId};

/// Where a process should go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Destination {
    /// To this node. A process' own home node means the same as `Home`.
    Node(NodeId),
    /// Back to its home node.
    Home,
    /// To the node that the balancer chooses.
    Balance,
    /// To its home, where it stays stopped until [`Request::Continue`]. Answered with `Done` if it
    /// is at home already.
    Frozen,
}

/// Whether the cluster may move a process automatically (`mosrun -l`, `-L`, `-k`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum Lock {
    /// It may.
    Unlocked,
    /// Only in an emergency, such as the shutdown of its node.
    Locked,
    /// Inherited from the caller.
    #[default]
    Keep,
}

/// A request of a tool, or of one of the node's shims, to the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Move a running process. Answered when it runs on the destination, or with the reason why it
    /// does not.
    Migrate {
        /// The process.
        pid: HomePid,
        /// Where to.
        to: Destination,
    },
    /// Move a process off this node: a guest to the node that its home chooses, a process that is
    /// at home to the best other node. Answered when it has left.
    LeaveNode {
        /// The process' pid at its home.
        pid: HomePid,
        /// Its home node. Needed only if guests of two homes have this pid.
        from: Option<NodeId>,
    },
    /// The node that `AtBest` would choose. The choice is counted as an arrival there.
    Best {
        /// Hints about the program that is to start.
        advice: Advice,
    },
    /// Measure the link to a node and store the result.
    Tune {
        /// The node.
        node: NodeId,
    },
    /// Replace the stored costs of a node by these, which `tune` has completed.
    KeepCosts(Costs),
    /// The costs of the links to other nodes: as measured by `tune`, and as the balancer uses them.
    Links,
    /// Let a frozen process continue. Answered with `Done`.
    Continue {
        /// The process.
        pid: HomePid,
    },
    /// `mosrun`: move the calling process (identified by its peer credentials) as soon as it has
    /// executed its program. Answered with `Ready` when a destination is prepared and the caller
    /// may call execve.
    AtExec {
        /// Nodes to try, in this order.
        candidates: Vec<NodeId>,
        /// Whether the cluster may move it afterwards.
        lock: Lock,
        /// Hints about the program.
        advice: Advice,
    },
    /// `mosrun -b`: like `AtExec`, on the most suitable node. Answered with `Ready` even if that is
    /// this node.
    AtBest {
        /// Whether the cluster may move it afterwards.
        lock: Lock,
        /// Hints about the program.
        advice: Advice,
    },
    /// `mosrun` without a node: register the calling process and its lock. Answered with `Done`.
    Register {
        /// Whether the cluster may move it.
        lock: Lock,
        /// Neither it nor its children ever migrate (`nomig`).
        never: bool,
        /// Hints about the program.
        advice: Advice,
    },
    /// This node's processes that are away or were started with mosrun, and its guests.
    Processes,
    /// The same list for another node, fetched from that node's daemon.
    ProcessesOf {
        /// That node. This node is allowed.
        node: NodeId,
    },
    /// The network sockets of this node's processes that are away, and the connections of guests
    /// that are on this node: those of the caller's processes, or all for root and the user who runs
    /// ternd. Answered with `Connections`.
    Connections,
    /// One process of this node, however it was started. Answered with `Process`.
    Process {
        /// The process.
        pid: HomePid,
    },
    /// The node that a symbolic name below `/mfs` stands for in a process. Answered with
    /// `ResolvedNode`.
    #[serde(rename = "place")]
    ResolveNode {
        /// The process.
        pid: HomePid,
        /// The symbolic name.
        #[serde(rename = "of")]
        name: SymbolicNode,
    },
    /// Set the node that `selected` or `magic` stands for in a process and its future children.
    /// `magic`: only from root or the user who runs ternd.
    #[serde(rename = "choose")]
    SetSymbolicNode {
        /// The process.
        pid: HomePid,
        /// `Selected` or `Magic`.
        #[serde(rename = "of")]
        name: SymbolicNode,
        /// The node; `None` is the process' home.
        node: Option<NodeId>,
    },
    /// Recent traffic of this node's processes on files of other nodes. Only from root or the user
    /// who runs ternd.
    FileTraffic(Vec<FileTraffic>),
    /// Set whether the cluster may move a running process and its future children. `Keep` is
    /// refused.
    SetLock {
        /// The process.
        pid: HomePid,
        /// See [`Lock`].
        lock: Lock,
    },
    /// Set hints for a running process and its future children. Absent hints stay as they are.
    Advise {
        /// The process.
        pid: HomePid,
        /// The hints.
        advice: Advice,
    },
    /// Perform a request on behalf of a user (root only). Requests about the calling process are
    /// refused.
    For {
        /// The user.
        uid: u32,
        /// The user's group.
        gid: u32,
        /// The request.
        request: Box<Request>,
    },
    /// The load and state of all nodes, as known to this one.
    Cluster,
    /// Explain why a process of this node runs where it does.
    Why {
        /// The process.
        pid: HomePid,
    },
    /// The state of this node, and whether the others are reachable.
    Status,
    /// Replace the map of the cluster (the text of `/etc/mosix.map`). The text is validated first;
    /// an invalid map changes nothing.
    SetMap {
        /// The file's text.
        text: String,
    },
    /// Remove a node from the cluster. Only on the node that founded the cluster.
    RemoveNode {
        /// The node.
        node: NodeId,
    },
    /// The current map, as text.
    GetMap,
    /// Leave the cluster: forget the map (`setpe -off`). Refused while processes are away or
    /// visiting.
    MapOff,
    /// Start the executor of placed commands (mexec), which listens at `RUN/mexec`, if it does not
    /// run. Answered with `Done`.
    #[serde(rename = "mexec")]
    StartMexec,
    /// Start the file tree from which guests map files of `home`, at `RUN/homeN.sock`, if it does
    /// not run. Only from root or the user who runs ternd. Answered with `Done`.
    #[serde(rename = "homes")]
    StartRemoteMaps {
        /// The home node whose files are mapped.
        home: NodeId,
    },
    /// Whether this node has capacity for another node's command. Answered with `Done` or
    /// `Refused`.
    #[serde(rename = "spares")]
    HasCapacity,
    /// The commands placed from this node, and those of other nodes that run here. Answered with
    /// `Placed`.
    Placed,
    /// Make a token for one join, valid for this many seconds.
    Token {
        /// 60 to 604,800.
        seconds: u32,
    },
    /// Turn a switch on or off.
    Switch {
        /// The switch.
        switch: Switch,
        /// Whether it is to be on.
        on: bool,
    },
    /// All switches and manual settings.
    Settings,
    /// Set the CPU speed that is used for balancing; `None` restores the measured one.
    SetSpeed {
        /// 10,000 for a standard CPU; 1 to 10,000,000.
        speed: Option<u32>,
    },
    /// Set how fast old observations of processes lose weight.
    SetDecay(DecayRates),
    /// Send guests away, bring own processes home, or both. Answered with `Done` when complete.
    /// Refused, with the numbers of remaining processes, if it takes longer than the time limit.
    Evacuate {
        /// Which processes.
        what: Evacuation,
        /// Time limit in seconds; none if absent.
        seconds: Option<u32>,
    },
    /// Undo `Evacuate`: guests may arrive, own processes may leave, and the node publishes its load
    /// again.
    Rejoin,
    /// From a home shim only: make `node` start a shim for a guest.
    Prepare {
        /// The destination.
        node: NodeId,
        /// The migration that begins with this request.
        migration: MigrationId,
        /// The keys (certificate fingerprints) that the new shim shall accept: home's first, then,
        /// for an onward journey, the source's.
        accepted_keys: Vec<Fingerprint>,
        /// The user of the process. The guest gets this identity on the destination.
        uid: u32,
        /// Its group.
        gid: u32,
        /// The processes that share memory with it and migrate with it.
        #[serde(rename = "company")]
        group: Vec<HomePid>,
    },
    /// From a shim only, to reconnect: the peer node's current address, and whether the peer shim
    /// is alive.
    Locate {
        /// The peer's node.
        node: NodeId,
        /// The peer shim.
        shim: ShimId,
    },
    /// From a guest shim only, when it has lost its home: like `Locate`, but `alive` is also
    /// `Some(false)` if home no longer waits for this epoch of the process.
    #[serde(rename = "awaited")]
    IsGuestAwaited {
        /// The home node.
        node: NodeId,
        /// The home shim.
        shim: ShimId,
        /// The process.
        pid: HomePid,
        /// The guest's epoch.
        epoch: Epoch,
    },
}

/// The daemon's reply.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// The request was refused, or it failed.
    Refused(Refusal),
    /// Done. No data.
    Done,
    /// To `AtExec` and `AtBest`: execute the program now.
    Ready,
    /// The process runs on its destination.
    Migrated(MigrationReport),
    /// To `Processes` and `ProcessesOf`.
    Processes(Vec<ProcessRow>),
    /// To `Connections`.
    Connections(Vec<ConnectionRow>),
    /// To `Placed`.
    Placed(Vec<PlacedRow>),
    /// To `Process`.
    Process(Box<ProcessRow>),
    /// To `ResolveNode`. `None`: no node was chosen, so the name stands for the process' home.
    #[serde(rename = "place")]
    ResolvedNode(Option<NodeId>),
    /// To `Cluster`.
    Cluster(ClusterReport),
    /// To `Status`.
    Status(StatusReport),
    /// To `Best`.
    Best(NodeId),
    /// To `Tune`.
    Tuned(Costs),
    /// To `Links`.
    Links(Vec<LinkRow>),
    /// To `GetMap`.
    Map(String),
    /// To `Why`.
    Why(Box<WhyReport>),
    /// To `Settings`.
    Settings(NodeSettings),
    /// To `Token`: the argument of `tern join`.
    Token(String),
    /// To `Prepare`.
    Prepared {
        /// `HOST:PORT` of the destination's daemon, which passes connections on to the shim.
        address: String,
        /// The new shim's id.
        shim: ShimId,
        /// The key that the new shim will present.
        fingerprint: Fingerprint,
    },
    /// To `Locate` and `IsGuestAwaited`.
    Located {
        /// `HOST:PORT` of that node's daemon, if it is reachable.
        address: Option<String>,
        /// `Some(false)` only if that node's daemon reports that the shim is gone, or
        /// (`IsGuestAwaited`) that it no longer waits for the guest. `None` if that daemon cannot
        /// be asked.
        alive: Option<bool>,
    },
}
