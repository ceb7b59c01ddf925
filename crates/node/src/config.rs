//! `ternd.toml`, and where a node keeps its things.
//!
//! Root's node uses the system's directories; a plain user's node those of the XDG base directories.

use crate::map::PORT;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::{env, fs, io};
use tern_ids::NodeId;

/// The name of the configuration in the configuration directory.
pub const FILE: &str = "ternd.toml";

/// The run directory of the system's node.
const RUN_DIR: &str = "/run/tern";

/// Where the administration's tree of that node is.
const ADMIN_TREE: &str = "/run/mosix";

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is not what it should be.
    #[error("{}: {problem}", path.display())]
    Wrong {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the line.
        problem: String,
    },
    /// A plain user without the variables that say where his things are.
    #[error("neither {0} nor HOME is set, so there is no place for this node's files")]
    NoPlace(&'static str),
}

/// The file, key for key.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// This node's number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<u16>,
    /// `HOST` or `HOST:PORT` under which others reach it; a loopback address is also all it listens on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The TCP port; 7101, or what the map says of this node, if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// For sockets; `/run/tern`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_dir: Option<PathBuf>,
    /// For file content of guests; `/var/cache/tern`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_dir: Option<PathBuf>,
    /// The map; `/etc/mosix.map`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub map: Option<PathBuf>,
    /// Seconds without its home after which a guest freezes; 5.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suspend_after: Option<u32>,
    /// Seconds after which home gives a lost guest up; 60.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub give_up_after: Option<u32>,
    /// Seconds that the end of ternd may take by which the node leaves the cluster (`systemctl stop`, shutdown of the
    /// machine); 60. With 0 nothing moves then, and all goes on without ternd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_within: Option<u32>,
    /// Whether this node takes guests; true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guests: Option<bool>,
    /// How nice guests are to this node's own processes: 0, as these, to 19; 5.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_nice: Option<u8>,
    /// Whether often used calls of guests on their files are made without a stop (docs/design/direct.md); true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hot_calls: Option<bool>,
    /// How many of this node's CPUs its guests may use together, as 1.5; all. It takes control groups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_cpus: Option<f64>,
    /// How much memory its guests may have together, in MiB; all that is free. When they grow beyond it the largest
    /// leave.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_memory: Option<u64>,
    /// Percent of this node's CPUs: when its own processes want more, guests leave, and none comes until 20 s after
    /// that is over. They stay if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner_share: Option<u32>,
    /// The nodes that may host this node's processes; all if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust: Option<Vec<u16>>,
    /// Whether this node moves its processes by itself; true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balance: Option<bool>,
    /// Users, by name or number, and groups, with an @ before, whose processes this node moves by itself whoever has
    /// started them, except daemons and the shells of sessions; none. Root's are among them only with `move_root`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balance_users: Option<Vec<String>>,
    /// Whether processes of root may be moved by others than root; false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub move_root: Option<bool>,
    /// The node that founded the cluster, and admits new ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub founder: Option<u16>,
    /// The shim program; `tern-shim` beside ternd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shim: Option<PathBuf>,
    /// Whether the other nodes may reach this node's files, below /mfs; true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfs: Option<bool>,
    /// Whether they may only read them; false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfs_read_only: Option<bool>,
    /// The directories that they may reach, by paths without symbolic links; all if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfs_paths: Option<Vec<PathBuf>>,
    /// Whether root of another node is nobody here; false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfs_squash_root: Option<bool>,
    /// Whether they are told at once of what programs of this node change in files that they have open; true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfs_notices: Option<bool>,
    /// How many commands of other nodes (mexec) run here at a time; one for each CPU, and one more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mexec_jobs: Option<u32>,
    /// Where the gatekeeper listens for commands of machines that are not in the cluster, as 192.0.2.1:7102; nowhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mexec_outside: Option<SocketAddr>,
    /// How many of them of one user; all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mexec_user_jobs: Option<u32>,
    /// Directories of file systems that are the same on all nodes that declare them, by these paths: guests read their files where they
    /// are; none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<Vec<PathBuf>>,
    /// Where the administration's tree is; `/run/mosix` for root's node in /run/tern, nowhere for others, nor if empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admin_tree: Option<PathBuf>,
}

/// The configuration in effect.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where `ternd.toml` and the node's identity are.
    pub config_dir: PathBuf,
    /// As said, without what was left out.
    pub file: File,
    /// For sockets.
    pub run_dir: PathBuf,
    /// For file content of guests.
    pub cache_dir: PathBuf,
    /// The map.
    pub map: PathBuf,
    /// Seconds.
    pub suspend_after: u32,
    /// Seconds.
    pub give_up_after: u32,
    /// Seconds; 0 if nothing moves when ternd ends.
    pub stop_within: u32,
    /// Whether this node takes guests.
    pub guests: bool,
    /// How nice guests are: 0 to 19.
    pub guest_nice: u8,
    /// Whether often used calls of guests on their files are made without a stop.
    pub hot_calls: bool,
    /// CPUs that guests may use together; `None` is all.
    pub guest_cpus: Option<f64>,
    /// MiB that guests may have together; `None` is all.
    pub guest_memory: Option<u64>,
    /// Percent of the CPUs that own processes want when guests must leave; `None` is never.
    pub owner_share: Option<u32>,
    /// The nodes that may host this node's processes; `None` is all.
    pub trust: Option<Vec<NodeId>>,
    /// Whether this node moves its processes by itself.
    pub balance: bool,
    /// Whose processes it moves besides what mosrun has started.
    pub balance_users: Vec<String>,
    /// Whether processes of root may be moved by others.
    pub move_root: bool,
    /// The shim program.
    pub shim: PathBuf,
    /// The program of both halves of MFS, beside ternd.
    pub mfs: PathBuf,
    /// The program of both halves of mexec, beside ternd.
    pub exec: PathBuf,
    /// Where the administration's tree is, if it is.
    pub admin_tree: Option<PathBuf>,
    /// The program that serves it, beside ternd.
    pub admin: PathBuf,
    /// This program, for checks that it makes as another user.
    pub ternd: PathBuf,
}

impl Config {
    /// Whether that node may host this node's processes.
    #[must_use]
    pub fn trusts(&self, node: NodeId) -> bool {
        self.trust.as_ref().is_none_or(|trust| trust.contains(&node))
    }

    /// Where the server of this node's files listens for its daemon.
    #[must_use]
    pub fn mfs_door(&self) -> PathBuf {
        self.run_dir.join("mfs.sock")
    }

    /// Where what runs other nodes' commands listens for its daemon.
    #[must_use]
    pub fn exec_door(&self) -> PathBuf {
        self.run_dir.join("exec.sock")
    }

    /// Where the clients of this node's gatekeeper are written down, one file each, and its own key.
    #[must_use]
    pub fn outside(&self) -> PathBuf {
        self.config_dir.join("outside")
    }

    /// Held by who serves the administration's tree; its number stands in it.
    #[must_use]
    pub fn admin_lock(&self) -> PathBuf {
        self.run_dir.join("admin.lock")
    }

    /// Bytes that guests may have together.
    pub(crate) fn guest_memory_bytes(&self) -> Option<u64> {
        self.guest_memory.map(|mebibytes| mebibytes.saturating_mul(1 << 20))
    }

    /// Reads `DIRECTORY/ternd.toml`; without it everything has its default.
    ///
    /// # Errors
    /// If it is there and unreadable or wrong.
    pub fn load(config_dir: &Path) -> Result<Self, ConfigError> {
        let path = config_dir.join(FILE);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            Err(source) => return Err(ConfigError::Read { path, source }),
        };
        let wrong = |problem: String| ConfigError::Wrong { path: path.clone(), problem };
        let file: File = toml::from_str(&text).map_err(|e| wrong(e.to_string().trim().replace('\n', " ")))?;
        if file.node == Some(0) || file.trust.iter().flatten().any(|node| *node == 0) {
            return Err(wrong("nodes are 1 to 65535".into()));
        }
        if file.port == Some(0) {
            return Err(wrong("port must be 1 to 65535".into()));
        }
        if file.guest_nice.is_some_and(|nice| nice > 19) {
            return Err(wrong("guest_nice must be 0 to 19".into()));
        }
        for (name, jobs) in [("mexec_jobs", file.mexec_jobs), ("mexec_user_jobs", file.mexec_user_jobs)] {
            if jobs == Some(0) {
                let said = format!("{name} must be at least 1; guests = false keeps all work of others out");
                return Err(wrong(said));
            }
        }
        if file.mexec_outside.is_some_and(|address| address.port() == 0) {
            return Err(wrong("mexec_outside is an address with a port, as 0.0.0.0:7102".into()));
        }
        if file.guest_cpus.is_some_and(|cpus| !(0.01..=65536.0).contains(&cpus)) {
            return Err(wrong(
                "guest_cpus must be 0.01 to 65536; guests = false keeps all guests out".into(),
            ));
        }
        if file.shared.iter().flatten().any(|path| !is_plain(path)) {
            return Err(wrong("shared must be whole paths of directories, without . and ..".into()));
        }
        let (suspend_after, give_up_after) =
            (file.suspend_after.unwrap_or(5), file.give_up_after.unwrap_or(60));
        if suspend_after == 0 || give_up_after <= suspend_after {
            return Err(wrong("give_up_after must be more than suspend_after, and that more than 0".into()));
        }
        let run_dir = file.run_dir.clone().map_or_else(run_dir, Ok)?;
        // Of several nodes on one machine (in tests, say) only the system's own has that place.
        let of_the_system = is_root() && run_dir == Path::new(RUN_DIR);
        let admin_tree = file.admin_tree.clone().or_else(|| of_the_system.then(|| PathBuf::from(ADMIN_TREE)));
        let admin_tree = admin_tree.filter(|tree| !tree.as_os_str().is_empty());
        if admin_tree.as_ref().is_some_and(|tree| !tree.is_absolute()) {
            return Err(wrong("admin_tree must be a whole path, or empty".into()));
        }
        let own = |source| ConfigError::Read { path: "/proc/self/exe".into(), source };
        let ternd = env::current_exe().map_err(own)?;
        Ok(Self {
            run_dir,
            cache_dir: file.cache_dir.clone().map_or_else(cache_dir, Ok)?,
            map: file.map.clone().unwrap_or_else(|| default_map(config_dir)),
            suspend_after,
            give_up_after,
            stop_within: file.stop_within.unwrap_or(60),
            guests: file.guests.unwrap_or(true),
            guest_nice: file.guest_nice.unwrap_or(5),
            hot_calls: file.hot_calls.unwrap_or_else(hot_by_environment),
            guest_cpus: file.guest_cpus,
            guest_memory: file.guest_memory,
            owner_share: file.owner_share,
            trust: file.trust.as_ref().map(|trust| trust.iter().copied().map(NodeId).collect()),
            balance: file.balance.unwrap_or(true),
            balance_users: file.balance_users.clone().unwrap_or_default(),
            move_root: file.move_root.unwrap_or(false),
            shim: file.shim.clone().unwrap_or_else(|| ternd.with_file_name("tern-shim")),
            mfs: ternd.with_file_name("tern-mfs"),
            exec: ternd.with_file_name("tern-exec"),
            admin_tree,
            admin: ternd.with_file_name("tern-admin"),
            ternd,
            config_dir: config_dir.to_owned(),
            file,
        })
    }
}

/// Whether it is the path of one directory below the root, and of no other way there.
fn is_plain(path: &Path) -> bool {
    let plain = path.components().collect::<PathBuf>().as_os_str() == path.as_os_str();
    plain
        && path.is_absolute()
        && path.parent().is_some()
        && !path.components().any(|c| c.as_os_str() == "..")
}

/// What holds where `ternd.toml` is silent. Tests run both ways.
fn hot_by_environment() -> bool {
    env::var_os("TERN_HOT_CALLS").is_none_or(|value| value != "0")
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// An XDG directory, or its default below the home directory.
fn xdg(variable: &'static str, below_home: &str) -> Result<PathBuf, ConfigError> {
    let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute(variable)
        .or_else(|| absolute("HOME").map(|home| home.join(below_home)))
        .map(|dir| dir.join("tern"))
        .ok_or(ConfigError::NoPlace(variable))
}

/// `/etc/tern`, or the user's.
///
/// # Errors
/// If a plain user has no home.
pub fn config_dir() -> Result<PathBuf, ConfigError> {
    if is_root() { Ok("/etc/tern".into()) } else { xdg("XDG_CONFIG_HOME", ".config") }
}

/// Where tools look for a node's control socket: `TERN_RUN_DIR`, `/run/tern`, or the user's.
fn run_dir() -> Result<PathBuf, ConfigError> {
    match env::var_os("TERN_RUN_DIR") {
        Some(dir) => Ok(dir.into()),
        None if is_root() => Ok(RUN_DIR.into()),
        None => xdg("XDG_RUNTIME_DIR", ".local/run"),
    }
}

fn cache_dir() -> Result<PathBuf, ConfigError> {
    if is_root() { Ok("/var/cache/tern".into()) } else { xdg("XDG_CACHE_HOME", ".cache") }
}

/// MOSIX's own place for the node of the system; beside the configuration for any other.
pub(crate) fn default_map(config_dir: &Path) -> PathBuf {
    if is_root() && config_dir == Path::new("/etc/tern") {
        "/etc/mosix.map".into()
    } else {
        config_dir.join("mosix.map")
    }
}

/// `HOST:PORT` from `HOST` or `HOST:PORT`.
pub(crate) fn with_port(address: &str) -> String {
    let bare_v6 = address.parse::<std::net::Ipv6Addr>().is_ok();
    if bare_v6 {
        format!("[{address}]:{PORT}")
    } else if address.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok()) {
        address.to_owned()
    } else {
        format!("{address}:{PORT}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn load(text: &str) -> Result<Config, ConfigError> {
        let dir = Scratch::new("config");
        fs::write(dir.0.join(FILE), text).unwrap();
        Config::load(&dir.0)
    }

    #[test]
    fn nothing_said_is_the_default() {
        let config = load("").unwrap();
        assert_eq!((config.suspend_after, config.give_up_after, config.guests), (5, 60, true));
        assert!(config.trust.is_none() && !config.move_root);
        assert!(Config::load(Path::new("/nonexistent")).is_ok());
        let tree = |text| load(text).unwrap().admin_tree;
        assert_eq!(tree("run_dir = \"/x\""), None, "another node of this machine");
        assert_eq!(tree("run_dir = \"/x\"\nadmin_tree = \"/y\""), Some("/y".into()));
        assert_eq!(tree("admin_tree = \"\""), None);
    }

    #[test]
    fn what_is_said_is_kept_and_can_be_written_back() {
        let text = "node = 3\nrun_dir = \"/x\"\nguests = false\ntrust = [1, 2]\n";
        let config = load(text).unwrap();
        assert_eq!(config.run_dir, Path::new("/x"));
        assert_eq!((config.guests, config.trust), (false, Some(vec![NodeId(1), NodeId(2)])));
        assert_eq!(toml::from_str::<File>(&toml::to_string(&config.file).unwrap()).unwrap(), config.file);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("nodes = 1", "unknown field `nodes`"),
            ("node = 0", "1 to 65535"),
            ("node = 70000", "u16"),
            ("port = 0", "port"),
            ("guests = 1", "boolean"),
            ("suspend_after = 60", "give_up_after"),
            ("guest_nice = 20", "0 to 19"),
            ("guest_cpus = 0.0", "0.01 to 65536"),
            ("guest_cpus = nan", "0.01 to 65536"),
            ("trust = [0]", "1 to 65535"),
            ("mexec_jobs = 0", "at least 1"),
            ("mexec_outside = \"7102\"", "invalid socket address"),
            ("mexec_outside = \"0.0.0.0:0\"", "with a port"),
            ("mexec_user_jobs = 0", "mexec_user_jobs must"),
            ("admin_tree = \"mosix\"", "whole path"),
            ("shared = [\"nfs\"]", "whole paths"),
            ("shared = [\"/nfs/../etc\"]", "whole paths"),
            ("shared = [\"/nfs/\"]", "whole paths"),
            ("shared = [\"/\"]", "whole paths"),
            ("x", "ternd.toml"),
        ] {
            let message = load(text).unwrap_err().to_string();
            assert!(message.contains(part) && !message.contains('\n'), "{text}: {message}");
        }
    }

    #[test]
    fn ports_are_added() {
        for (given, whole) in [
            ("a", "a:7101"),
            ("a:1", "a:1"),
            ("10.0.0.1", "10.0.0.1:7101"),
            ("fd00::1", "[fd00::1]:7101"),
            ("[fd00::1]:9", "[fd00::1]:9"),
        ] {
            assert_eq!(with_port(given), whole);
        }
    }
}
