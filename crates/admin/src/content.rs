//! The content of files. Most contain one value and a newline, as with MOSIX; booleans are 0 and 1.

use crate::inode::{Dir, Inode, Leaf};
use crate::ternd::Ternd;
use rustix::io::Errno;
use tern_control::{
    ClusterReport, NodeLoad, NodeSettings, NodeState, ProcessRow, Reply, Request, SymbolicNode,
};
use tern_ids::{HomePid, NodeId};

/// Value that MOSIX shows for a node that cannot be reached: -ENETUNREACH.
const UNREACHABLE: i32 = -101;

/// Bits of a node's `status`.
const CONFIGURED: u32 = 1;
const UP: u32 = 2;
const STAY: u32 = 4;
const LSTAY: u32 = 8;
const BLOCK: u32 = 16;
const QUIET: u32 = 32;
const NOMFS: u32 = 64;

/// Units of `/proc`: clock ticks per second, and bytes per page.
const TICKS_PER_SECOND: f64 = 100.0;
const PAGE_SIZE: u64 = 4096;

/// The cluster, as seen by this node.
pub(crate) fn cluster(ternd: &Ternd) -> Result<ClusterReport, Errno> {
    match ternd.request(&Request::Cluster)? {
        Reply::Cluster(report) => Ok(report),
        _ => Err(Errno::IO),
    }
}

/// The guests of this node.
pub(crate) fn guests(ternd: &Ternd) -> Result<Vec<ProcessRow>, Errno> {
    match ternd.request(&Request::Processes)? {
        Reply::Processes(rows) => Ok(rows.into_iter().filter(|row| row.from.is_some()).collect()),
        _ => Err(Errno::IO),
    }
}

/// File name of a guest: `PID`, or `PID.HOME` if an earlier row has the same pid.
pub(crate) fn guest_name(rows: &[ProcessRow], row: &ProcessRow) -> String {
    let first = rows.iter().find(|other| other.pid == row.pid);
    match row.from {
        Some(home) if first.is_some_and(|first| first.from != row.from) => format!("{}.{home}", row.pid),
        _ => row.pid.to_string(),
    }
}

/// A process of this node.
pub(crate) fn process(ternd: &Ternd, pid: HomePid) -> Result<ProcessRow, Errno> {
    match ternd.request(&Request::Process { pid }) {
        Ok(Reply::Process(row)) => Ok(*row),
        Ok(_) => Err(Errno::IO),
        Err(Errno::NXIO) => Err(Errno::SRCH),
        Err(errno) => Err(errno),
    }
}

/// The current content of a file.
///
/// # Errors
/// `ESRCH` if the process is gone, `ENOTCONN` if ternd is not running.
pub(crate) fn content(ternd: &Ternd, inode: Inode, evacuating: (bool, bool)) -> Result<String, Errno> {
    let Some(leaf) = inode.leaf else { return Err(Errno::ISDIR) };
    Ok(match inode.dir {
        Dir::Admin => of_admin(ternd, leaf, evacuating)?,
        Dir::Node(node) => {
            let report = cluster(ternd)?;
            let node = report.nodes.iter().find(|known| known.node == node).ok_or(Errno::NXIO)?;
            line(of_node(node, leaf))
        }
        Dir::Guest(home, pid) => {
            let rows = guests(ternd)?;
            let row = rows.iter().find(|row| row.pid == pid && row.from == Some(home));
            of_guest(row.ok_or(Errno::SRCH)?, leaf)
        }
        Dir::Process(pid) if leaf == Leaf::Selected => {
            match ternd.request(&Request::ResolveNode { pid, name: SymbolicNode::Selected })? {
                Reply::ResolvedNode(node) => line(node.map_or(0, |node| node.0)),
                _ => return Err(Errno::IO),
            }
        }
        Dir::Process(pid) => of_process(&process(ternd, pid)?, leaf, cluster(ternd)?.me),
        _ => return Err(Errno::INVAL),
    })
}

fn line(value: impl std::fmt::Display) -> String {
    format!("{value}\n")
}

fn of_admin(ternd: &Ternd, leaf: Leaf, (bringing, expelling): (bool, bool)) -> Result<String, Errno> {
    let switch = |on: bool| line(u8::from(on));
    let settings = || match ternd.request(&Request::Settings)? {
        Reply::Settings(settings) => Ok::<NodeSettings, Errno>(settings),
        _ => Err(Errno::IO),
    };
    Ok(match leaf {
        Leaf::Mospe => {
            let report = cluster(ternd)?;
            // A node without a map belongs to no cluster.
            line(if report.nodes.is_empty() { 0 } else { report.me.0 })
        }
        Leaf::Stay => switch(settings()?.stay),
        Leaf::Lstay => switch(settings()?.local_stay),
        Leaf::Block => switch(settings()?.block),
        Leaf::Quiet => switch(settings()?.quiet),
        Leaf::NoMfs => switch(settings()?.no_mfs),
        Leaf::Bring => switch(bringing),
        Leaf::Expel => switch(expelling),
        Leaf::OwnSpeed => {
            let report = cluster(ternd)?;
            line(report.nodes.iter().find(|node| node.node == report.me).map_or(0, |node| node.speed))
        }
        Leaf::Version => format!("Tern {}\n", env!("CARGO_PKG_VERSION")),
        Leaf::Config => match ternd.request(&Request::GetMap)? {
            Reply::Map(text) => text,
            _ => return Err(Errno::IO),
        },
        Leaf::DecayInterval => line(settings()?.decay.interval),
        Leaf::SlowDecay => line(settings()?.decay.slow),
        Leaf::FastDecay => line(settings()?.decay.fast),
        _ => return Err(Errno::INVAL),
    })
}

fn of_node(node: &NodeLoad, leaf: Leaf) -> i64 {
    let up = matches!(node.state, NodeState::Alive | NodeState::Suspect);
    if leaf == Leaf::Status {
        let flags = node.flags;
        let bits = [
            (true, CONFIGURED),
            (up, UP),
            (up && flags.stay, STAY),
            (up && flags.lstay, LSTAY),
            (up && flags.block, BLOCK),
            (up && flags.quiet, QUIET),
            (up && flags.nomfs, NOMFS),
        ];
        return bits.into_iter().filter(|(set, _)| *set).map(|(_, bit)| i64::from(bit)).sum();
    }
    // A node with speed 0 is up, but its load is not known yet.
    if !up || node.speed == 0 {
        return UNREACHABLE.into();
    }
    let bytes = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    match leaf {
        Leaf::Cpus => (node.cpus.ceil() as i64).max(1),
        Leaf::Load => node.load.round() as i64,
        Leaf::Mem => bytes(node.mem_free),
        Leaf::Rmem => bytes(node.mem_raw_free),
        Leaf::Tmem => bytes(node.mem_total),
        Leaf::Speed => node.speed.into(),
        Leaf::Util => node.utilisability.into(),
        _ => UNREACHABLE.into(),
    }
}

fn of_guest(row: &ProcessRow, leaf: Leaf) -> String {
    let pages = row.usage.memory / PAGE_SIZE;
    match leaf {
        Leaf::From => line(row.from.unwrap_or(NodeId(0))),
        Leaf::Identity => format!("pid={} uid={} command={}\n", row.pid, row.uid, sanitize(&row.command)),
        Leaf::Statm => format!("{pages} {pages} 0 0 0 {pages} 0\n"),
        Leaf::Stats => format!(
            "utime={} cutime=0 nice=0 state={} vsize={} rss={pages} nswap=0 cnswap=0\n",
            (row.cpu_seconds * TICKS_PER_SECOND) as u64,
            if row.state == "running" { 'R' } else { 'T' },
            row.usage.memory,
        ),
        _ => String::new(),
    }
}

fn of_process(row: &ProcessRow, leaf: Leaf, me: NodeId) -> String {
    match leaf {
        Leaf::Where => line(row.r#where.filter(|node| *node != me).map_or(0, |node| node.0)),
        Leaf::CantMove if row.reason.is_empty() => String::new(),
        Leaf::CantMove => line(sanitize(&row.reason)),
        // A process that the cluster does not move by itself counts as locked.
        Leaf::Lock => line(u8::from(row.started.is_none_or(|started| started.locked || started.never))),
        Leaf::Nmigs => line(row.migrations),
        // MOSIX shows the last destination here. That is where the process is.
        Leaf::Goto | Leaf::Migrate => line(row.r#where.filter(|node| *node != me).map_or(0, |node| node.0)),
        _ => String::new(),
    }
}

/// Replaces control characters in text of other users, so that it is one line and safe for a
/// terminal.
fn sanitize(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tern_control::{NodeFlags, StartedAs, Usage};

    fn node(state: NodeState) -> NodeLoad {
        NodeLoad {
            node: NodeId(2),
            host: "beta".into(),
            state,
            age_ms: 0,
            load: 149.6,
            speed: 9000,
            cpus: 1.5,
            mem_total: 3 << 30,
            mem_free: 2 << 30,
            mem_raw_free: 1 << 30,
            swap_total: 0,
            swap_free: 0,
            utilisability: 97,
            guests: 0,
            away: 0,
            flags: NodeFlags { stay: true, quiet: true, nomfs: true, ..NodeFlags::default() },
        }
    }

    fn row(pid: i32, from: Option<u16>) -> ProcessRow {
        ProcessRow {
            pid: HomePid(pid),
            uid: 5,
            r#where: Some(NodeId(2)),
            from: from.map(NodeId),
            state: "running".into(),
            cpu_seconds: 1.5,
            migrations: 3,
            reason: "it is\nnosy".into(),
            command: "a b".into(),
            usage: Usage { memory: 8 << 20, ..Usage::default() },
            started: None,
        }
    }

    #[test]
    fn node_files_contain_numbers_even_if_it_is_down() {
        let up = node(NodeState::Alive);
        let value = |leaf| of_node(&up, leaf);
        assert_eq!((value(Leaf::Load), value(Leaf::Cpus), value(Leaf::Util)), (150, 2, 97));
        assert_eq!((value(Leaf::Mem), value(Leaf::Rmem), value(Leaf::Tmem)), (2 << 30, 1 << 30, 3 << 30));
        assert_eq!(value(Leaf::Status), 1 + 2 + 4 + 32 + 64);
        let down = node(NodeState::Dead);
        assert_eq!((of_node(&down, Leaf::Load), of_node(&down, Leaf::Status)), (-101, 1));
        assert_eq!(of_node(&node(NodeState::NeverSeen), Leaf::Speed), -101);
    }

    #[test]
    fn process_files_show_where_it_is_and_whether_it_may_move() {
        let mut away = row(31, None);
        assert_eq!(of_process(&away, Leaf::Where, NodeId(1)), "2\n");
        assert_eq!(of_process(&away, Leaf::Where, NodeId(2)), "0\n", "at home");
        assert_eq!(of_process(&away, Leaf::CantMove, NodeId(1)), "it is?nosy\n");
        assert_eq!(of_process(&away, Leaf::Nmigs, NodeId(1)), "3\n");
        assert_eq!(of_process(&away, Leaf::Lock, NodeId(1)), "1\n");
        away.started = Some(StartedAs::default());
        assert_eq!(of_process(&away, Leaf::Lock, NodeId(1)), "0\n");
        away.reason.clear();
        assert_eq!(of_process(&away, Leaf::CantMove, NodeId(1)), "");
    }

    #[test]
    fn guests_with_equal_pids_have_distinct_names() {
        let rows = [row(31, Some(3)), row(31, Some(4)), row(7, Some(4))];
        let names: Vec<_> = rows.iter().map(|row| guest_name(&rows, row)).collect();
        assert_eq!(names, ["31", "31.4", "7"]);
        assert_eq!(of_guest(&rows[1], Leaf::From), "4\n");
        assert!(of_guest(&rows[0], Leaf::Stats).starts_with("utime=150 cutime=0 nice=0 state=R vsize="));
        assert_eq!(of_guest(&rows[0], Leaf::Statm), "2048 2048 0 0 0 2048 0\n");
    }
}
