//! Requests to the node's daemon, and its replies.

use crate::advice::Advice;
use crate::cluster::ClusterReport;
use crate::costs::{Costs, LinkRow};
use crate::place::Place;
use crate::report::{MigrationReport, PlacedRow, ProcessRow, Refusal, StatusReport};
use crate::steer::{Decay, Evacuation, Settings, Switch};
use crate::traffic::FileTraffic;
use crate::why::WhyReport;
use serde::{Deserialize, Serialize};
use tern_ids::{Epoch, Fingerprint, HomePid, MigrationId, NodeId, ShimId};

/// Where a process should go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Destination {
    /// To this node; its home node means the same as `Home`.
    Node(NodeId),
    /// Back to its home.
    Home,
    /// Wherever the balancer would have it.
    Balance,
    /// To its home, where it stands still until [`Request::Continue`]. Answered with `Done` if it is there already.
    Frozen,
}

/// Whether the cluster may move a process by itself (`mosrun -l`, `-L`, `-k`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum Lock {
    /// It may.
    Unlocked,
    /// Only in an emergency, such as the shutdown of its node.
    Locked,
    /// As the caller is.
    #[default]
    Keep,
}

/// What a tool, or one of the node's shims, asks of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Move a running process; answered when it runs there, or with the reason why not.
    Migrate {
        /// The process.
        pid: HomePid,
        /// Where to.
        to: Destination,
    },
    /// Have a guest leave this node, for wherever its home would have it, or a process of this node that is at home, for
    /// the best other node. Answered when it is gone.
    Out {
        /// By its number at its home.
        pid: HomePid,
        /// Its home, if it is not clear from the number: guests of two homes may have the same.
        from: Option<NodeId>,
    },
    /// The node that `AtBest` would choose. It is counted as chosen.
    Best {
        /// What is said of the program that is to start.
        advice: Advice,
    },
    /// Measure the link to a node, and keep that.
    Tune {
        /// Which.
        node: NodeId,
    },
    /// Keep what was measured of a node besides.
    KeepCosts(Costs),
    /// What was measured, and what the balancer reckons with.
    Links,
    /// Let a process go on that was frozen. Answered with `Done`.
    Continue {
        /// The process.
        pid: HomePid,
    },
    /// `mosrun`: move the calling process (known from its credentials) as soon as it has executed its
    /// program. Answered with `Ready` when a destination is prepared and execve may be called.
    AtExec {
        /// Nodes to try, in this order.
        candidates: Vec<NodeId>,
        /// May the cluster move it afterwards?
        lock: Lock,
        /// What else is said of it.
        advice: Advice,
    },
    /// `mosrun -b`: as `AtExec`, on the node that suits it best. Answered with `Ready` also if that is this one.
    AtBest {
        /// May the cluster move it afterwards?
        lock: Lock,
        /// What else is said of it.
        advice: Advice,
    },
    /// `mosrun` without a node: note the calling process and its lock. Answered with `Done`.
    Register {
        /// May the cluster move it?
        lock: Lock,
        /// It never migrates, nor do its children (`nomig`).
        never: bool,
        /// What else is said of it.
        advice: Advice,
    },
    /// The processes of this node that are away, came from elsewhere, or were started with mosrun.
    Processes,
    /// The same rows of another node, as that node has them, through its daemon.
    ProcessesOf {
        /// That node; this one is allowed.
        node: NodeId,
    },
    /// One process of this node, whoever has started it. Answered with `Process`.
    Process {
        /// It.
        pid: HomePid,
    },
    /// The node that a process means by a name below `/mfs`. Answered with `Place`.
    Place {
        /// The process.
        pid: HomePid,
        /// The name.
        of: Place,
    },
    /// Let a process, and what it forks from now on, mean that node by `selected`, or (root only) by `magic`.
    Choose {
        /// The process.
        pid: HomePid,
        /// `Selected` or `Magic`.
        of: Place,
        /// The node; none: its home.
        node: Option<NodeId>,
    },
    /// What processes of this node have read and written of other nodes' files lately (root only).
    FileTraffic(Vec<FileTraffic>),
    /// May the cluster move a running process by itself, and what it forks? `Keep` is refused.
    SetLock {
        /// The process.
        pid: HomePid,
        /// See [`Lock`].
        lock: Lock,
    },
    /// Something is said of a running process, and of what it forks; what is not said stays.
    Advise {
        /// The process.
        pid: HomePid,
        /// What.
        advice: Advice,
    },
    /// From root only: the same as if that user asked it. What goes by the calling process is refused.
    For {
        /// The user.
        uid: u32,
        /// His group.
        gid: u32,
        /// What he asks.
        request: Box<Request>,
    },
    /// The load and state of all nodes, as far as this one knows.
    Cluster,
    /// Why a process of this node is where it is.
    Why {
        /// The process.
        pid: HomePid,
    },
    /// The node and what it knows of the others.
    Status,
    /// Replace the map of the cluster (the text of `/etc/mosix.map`); checked first, all or nothing.
    SetMap {
        /// The file's text.
        text: String,
    },
    /// The map in use, as text.
    GetMap,
    /// Leave the cluster: forget the map (`setpe -off`). Refused while processes are away or visiting.
    MapOff,
    /// Have what places commands run (mexec), which listens at `RUN/mexec`. (`Done`.)
    Mexec,
    /// Have the tree run from which guests map files of this home, at `RUN/homeN.sock`; of root only. (`Done`.)
    Homes {
        /// Whose files.
        home: NodeId,
    },
    /// Whether this node has something left for one more command of another node. Answered with `Done` or `Refused`.
    Spares,
    /// The commands that are placed from this node, and those of others here. Answered with `Placed`.
    Placed,
    /// Make a token for one join, valid this many seconds.
    Token {
        /// 60 to 604,800.
        seconds: u32,
    },
    /// Switch something on or off.
    Switch {
        /// What.
        switch: Switch,
        /// On?
        on: bool,
    },
    /// What is switched on, and set by hand.
    Settings,
    /// The speed of this node's CPUs for balancing, or the measured one again.
    SetSpeed {
        /// 10,000 for a standard CPU; 1 to 10,000,000.
        speed: Option<u32>,
    },
    /// How fast habits of processes are forgotten.
    SetDecay(Decay),
    /// Send guests away, bring own processes home. Answered with `Done` when it is done; refused with what is left if
    /// it is not within the time.
    Evacuate {
        /// What of it.
        what: Evacuation,
        /// Seconds that it may take; for ever if absent.
        seconds: Option<u32>,
    },
    /// Undo `Evacuate`: guests may come, own processes leave, and the node tells of itself.
    Rejoin,
    /// From a home shim only: have `node` start a shim for a guest.
    Prepare {
        /// The destination.
        node: NodeId,
        /// The migration that this begins.
        migration: MigrationId,
        /// The keys (certificate fingerprints) which the new shim shall accept: home's first, then, for
        /// an onward journey, the source's.
        accept: Vec<Fingerprint>,
        /// The user whose process it is; the guest gets this identity on the destination.
        uid: u32,
        /// Its group.
        gid: u32,
        /// Those who share memory with it, and come along.
        company: Vec<HomePid>,
    },
    /// From a shim only: for a reconnection, where that node is now and whether the peer shim lives.
    Locate {
        /// The peer's node.
        node: NodeId,
        /// The peer shim.
        shim: ShimId,
    },
    /// From a guest shim only, when it has lost its home: the same, and not alive if home does not wait for this
    /// life of the process any more.
    Awaited {
        /// The home.
        node: NodeId,
        /// The home shim.
        shim: ShimId,
        /// The process.
        pid: HomePid,
        /// The life that the guest is.
        epoch: Epoch,
    },
}

/// What the daemon answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// It was not done; nothing has changed.
    Refused(Refusal),
    /// Done, with nothing to report.
    Done,
    /// `AtExec`: execute the program now.
    Ready,
    /// The process runs there.
    Migrated(MigrationReport),
    /// To `Processes` and `ProcessesOf`.
    Processes(Vec<ProcessRow>),
    /// To `Placed`.
    Placed(Vec<PlacedRow>),
    /// To `Process`.
    Process(Box<ProcessRow>),
    /// To `Place`; none: nothing was chosen, which is the process' home.
    Place(Option<NodeId>),
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
    Settings(Settings),
    /// To `Token`: what `tern join` takes.
    Token(String),
    /// To `Prepare`.
    Prepared {
        /// `HOST:PORT` of the destination's daemon, which passes connections for the shim on to it.
        address: String,
        /// The new shim.
        shim: ShimId,
        /// The key to expect of it.
        fingerprint: Fingerprint,
    },
    /// To `Locate` and `Awaited`.
    Located {
        /// `HOST:PORT` of that node's daemon, if it answered.
        address: Option<String>,
        /// `Some(false)` only on proof: that daemon says that the shim is gone (or the process, with it), or the node has booted since.
        alive: Option<bool>,
    },
}
