//! `ternd.toml`, and the directories of a node.
//!
//! Root's node uses the system's directories, a plain user's node the XDG base directories.

pub(crate) mod settings;

use crate::cluster::map::PORT;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::{env, fs, io};
use tern_ids::NodeId;

/// The name of the file in the configuration directory.
pub const FILE: &str = "ternd.toml";

/// The run directory of root's node.
const RUN_DIR: &str = "/run/tern";

/// The default path of the administration tree, for the node with that run directory.
const ADMIN_TREE: &str = "/run/mosix";

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The file is invalid.
    #[error("{}: {problem}", path.display())]
    Wrong {
        /// The file.
        path: PathBuf,
        /// The problem, with its line number.
        problem: String,
    },
    /// Neither the XDG variable nor HOME is set for a plain user.
    #[error("neither {0} nor HOME is set, so there is no place for this node's files")]
    NoDirectory(&'static str),
}

/// The keys of the file. For an optional key, the default follows after a semicolon.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// This node's number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<u16>,
    /// `HOST` or `HOST:PORT` at which other nodes reach this one. With a loopback address ternd
    /// listens there only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The TCP port; by default that of this node in the map, or 7101.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// The directory for sockets; `/run/tern`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_dir: Option<PathBuf>,
    /// The cache directory for file content of guests; `/var/cache/tern`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_dir: Option<PathBuf>,
    /// The path of the map; `/etc/mosix.map`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub map: Option<PathBuf>,
    /// Seconds without contact to its home after which a guest is suspended; 5.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suspend_after: Option<u32>,
    /// Seconds without contact after which home kills the process of a lost guest; 60.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub give_up_after: Option<u32>,
    /// Seconds that ternd may take to leave the cluster when it is stopped (`systemctl stop`,
    /// shutdown of the machine); 60. With 0 no process moves, and all continue without ternd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_within: Option<u32>,
    /// Whether this node accepts guests; true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guests: Option<bool>,
    /// The nice value of guests, 0 to 19; 5.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_nice: Option<u8>,
    /// Whether frequent calls of guests on their files are made by patched code, without a trap
    /// (docs/design/delegation.md); true. Its former name, `hot_calls`, is accepted too.
    #[serde(alias = "hot_calls", skip_serializing_if = "Option::is_none")]
    pub fastpath: Option<bool>,
    /// Number of this node's CPUs that all guests together may use, such as 1.5; all. Needs control
    /// groups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_cpus: Option<f64>,
    /// Memory that all guests together may use, in MiB; all that is free. If they use more, the
    /// largest are sent away.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_memory: Option<u64>,
    /// Percent of this node's CPUs. When its own processes need more, guests are sent away, and
    /// none is accepted until 20 s after that has ended. If absent, guests stay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner_share: Option<u32>,
    /// The nodes that may host processes of this node; all if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust: Option<Vec<u16>>,
    /// Whether the balancer moves processes of this node; true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balance: Option<bool>,
    /// Users, by name or number, and groups, with an @ in front; none. The balancer moves their
    /// processes even if mosrun has not started them, except daemons and the shells of sessions.
    /// Processes of root are included only with `move_root`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balance_users: Option<Vec<String>>,
    /// Whether users other than root may move processes of root; false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub move_root: Option<bool>,
    /// The node that founded the cluster, and that admits new nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub founder: Option<u16>,
    /// The path of the shim program; `tern-shim` in the directory of ternd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shim: Option<PathBuf>,
    /// Whether other nodes may reach this node's files below /mfs; true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfs: Option<bool>,
    /// Whether other nodes may only read the files; false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfs_read_only: Option<bool>,
    /// The directories that other nodes may reach, as paths without symbolic links; all if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfs_paths: Option<Vec<PathBuf>>,
    /// Whether root of another node is mapped to nobody here; false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfs_squash_root: Option<bool>,
    /// Whether other nodes are notified at once when a program of this node changes files that they
    /// have open; true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfs_notices: Option<bool>,
    /// Whether a process of this node stays away if it maps a file shared there; true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_files: Option<bool>,
    /// Whether TCP connections move with their processes, in both directions; false. Needs root.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<bool>,
    /// Number of commands of other nodes (mexec) that run here at a time; by default the number of
    /// CPUs plus 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mexec_jobs: Option<u32>,
    /// The address at which the gatekeeper accepts commands of machines outside the cluster, such
    /// as 192.0.2.1:7102; none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mexec_outside: Option<SocketAddr>,
    /// Number of commands (mexec) of one user that run here at a time; not limited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mexec_user_jobs: Option<u32>,
    /// Directories of file systems that are the same, at the same paths, on all nodes that list
    /// them. Guests read files below these directories locally; none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<Vec<PathBuf>>,
    /// The path of the administration tree; `/run/mosix` for root's node in /run/tern, none for
    /// others. With an empty path there is no tree.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admin_tree: Option<PathBuf>,
}

/// The configuration in effect.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where `ternd.toml` and the node's identity are.
    pub config_dir: PathBuf,
    /// The contents of the file, without defaults.
    pub file: File,
    /// The directory for sockets.
    pub run_dir: PathBuf,
    /// The cache directory for file content of guests.
    pub cache_dir: PathBuf,
    /// The path of the map.
    pub map: PathBuf,
    /// Seconds without contact to its home after which a guest is suspended.
    pub suspend_after: u32,
    /// Seconds without contact after which home kills the process of a lost guest.
    pub give_up_after: u32,
    /// Seconds that leaving the cluster may take when ternd is stopped; 0 if no process moves then.
    pub stop_within: u32,
    /// Whether this node accepts guests.
    pub guests: bool,
    /// The nice value of guests: 0 to 19.
    pub guest_nice: u8,
    /// Whether frequent calls of guests on their files are made by patched code, without a trap.
    pub fastpath: bool,
    /// Number of CPUs that all guests together may use; `None` is all.
    pub guest_cpus: Option<f64>,
    /// MiB of memory that all guests together may use; `None` is all.
    pub guest_memory: Option<u64>,
    /// Percent of the CPUs: when own processes need more, guests are sent away; `None` is never.
    pub owner_share: Option<u32>,
    /// The nodes that may host processes of this node; `None` is all.
    pub trust: Option<Vec<NodeId>>,
    /// Whether the balancer moves processes of this node.
    pub balance: bool,
    /// Users and groups whose processes the balancer moves even if mosrun has not started them.
    pub balance_users: Vec<String>,
    /// Whether users other than root may move processes of root.
    pub move_root: bool,
    /// The path of the shim program.
    pub shim: PathBuf,
    /// The path of the MFS program, in the directory of ternd.
    pub mfs: PathBuf,
    /// The path of the mexec program, in the directory of ternd.
    pub exec: PathBuf,
    /// The path of the program that moves connections, in the directory of ternd.
    pub net: PathBuf,
    /// The path of the administration tree, if there is one.
    pub admin_tree: Option<PathBuf>,
    /// The path of the program that serves the administration tree, in the directory of ternd.
    pub admin: PathBuf,
    /// The path of this program, which runs itself as another user for access checks.
    pub ternd: PathBuf,
}

impl Config {
    /// Whether this node trusts the other one with its processes.
    #[must_use]
    pub fn trusts(&self, node: NodeId) -> bool {
        self.trust.as_ref().is_none_or(|trust| trust.contains(&node))
    }

    /// The socket at which the file server accepts connections from ternd.
    #[must_use]
    pub fn mfs_socket(&self) -> PathBuf {
        self.run_dir.join("mfs.sock")
    }

    /// The socket at which the command server accepts connections from ternd.
    #[must_use]
    pub fn exec_socket(&self) -> PathBuf {
        self.run_dir.join("exec.sock")
    }

    /// The directory with the gatekeeper's key, and one file for each of its clients.
    #[must_use]
    pub fn gatekeeper_dir(&self) -> PathBuf {
        self.config_dir.join("outside")
    }

    /// The lock file that the server of the administration tree holds; it contains the server's
    /// pid.
    #[must_use]
    pub fn admin_lock(&self) -> PathBuf {
        self.run_dir.join("admin.lock")
    }

    /// Bytes of memory that all guests together may use.
    pub(crate) fn guest_memory_bytes(&self) -> Option<u64> {
        self.guest_memory.map(|mebibytes| mebibytes.saturating_mul(1 << 20))
    }

    /// Reads `DIRECTORY/ternd.toml`; a missing file means defaults only.
    ///
    /// # Errors
    /// If the file is unreadable or invalid.
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
                let message = format!(
                    "{name} must be at least 1; use guests = false to refuse all work of other nodes"
                );
                return Err(wrong(message));
            }
        }
        if file.mexec_outside.is_some_and(|address| address.port() == 0) {
            return Err(wrong("mexec_outside must be an address with a port, such as 0.0.0.0:7102".into()));
        }
        if file.guest_cpus.is_some_and(|cpus| !(0.01..=65536.0).contains(&cpus)) {
            return Err(wrong(
                "guest_cpus must be 0.01 to 65536; use guests = false to refuse all guests".into(),
            ));
        }
        if file.shared.iter().flatten().any(|path| !is_canonical_path(path)) {
            return Err(wrong("shared must be absolute paths of directories, without . and ..".into()));
        }
        let (suspend_after, give_up_after) =
            (file.suspend_after.unwrap_or(5), file.give_up_after.unwrap_or(60));
        if suspend_after == 0 || give_up_after <= suspend_after {
            return Err(wrong(
                "suspend_after must be more than 0, and give_up_after more than suspend_after".into(),
            ));
        }
        let run_dir = file.run_dir.clone().map_or_else(run_dir, Ok)?;
        // Several nodes may run on one machine, as in tests. Only one gets the default path.
        let is_system = is_root() && run_dir == Path::new(RUN_DIR);
        let admin_tree = file.admin_tree.clone().or_else(|| is_system.then(|| PathBuf::from(ADMIN_TREE)));
        let admin_tree = admin_tree.filter(|tree| !tree.as_os_str().is_empty());
        if admin_tree.as_ref().is_some_and(|tree| !tree.is_absolute()) {
            return Err(wrong("admin_tree must be an absolute path, or empty".into()));
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
            fastpath: file.fastpath.unwrap_or_else(fastpath_by_environment),
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
            net: ternd.with_file_name("tern-net"),
            admin_tree,
            admin: ternd.with_file_name("tern-admin"),
            ternd,
            config_dir: config_dir.to_owned(),
            file,
        })
    }
}

/// Whether this is an absolute path below the root directory in canonical form.
fn is_canonical_path(path: &Path) -> bool {
    let plain = path.components().collect::<PathBuf>().as_os_str() == path.as_os_str();
    plain
        && path.is_absolute()
        && path.parent().is_some()
        && !path.components().any(|c| c.as_os_str() == "..")
}

/// The default of `fastpath`. Tests set the variable to 0 to run without the fast path.
fn fastpath_by_environment() -> bool {
    env::var_os("TERN_HOT_CALLS").is_none_or(|value| value != "0")
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The directory `tern` in an XDG directory, or in its default below the home directory.
fn xdg(variable: &'static str, below_home: &str) -> Result<PathBuf, ConfigError> {
    let absolute = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute(variable)
        .or_else(|| absolute("HOME").map(|home| home.join(below_home)))
        .map(|dir| dir.join("tern"))
        .ok_or(ConfigError::NoDirectory(variable))
}

/// The configuration directory: `/etc/tern`, or that of the user.
///
/// # Errors
/// If the home directory of a plain user is not known.
pub fn config_dir() -> Result<PathBuf, ConfigError> {
    if is_root() { Ok("/etc/tern".into()) } else { xdg("XDG_CONFIG_HOME", ".config") }
}

/// The run directory, with the control socket: `TERN_RUN_DIR`, `/run/tern`, or that of the user.
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

/// The default path of the map: MOSIX's if `config_dir` is that of root's node, else a file in
/// `config_dir`.
pub(crate) fn default_map(config_dir: &Path) -> PathBuf {
    if is_root() && config_dir == Path::new("/etc/tern") {
        "/etc/mosix.map".into()
    } else {
        config_dir.join("mosix.map")
    }
}

/// Adds the default port to `HOST`; leaves `HOST:PORT` as it is.
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
    use crate::os::scratch::Scratch;

    fn load(text: &str) -> Result<Config, ConfigError> {
        let dir = Scratch::new("config");
        fs::write(dir.0.join(FILE), text).unwrap();
        Config::load(&dir.0)
    }

    #[test]
    fn defaults_apply_to_absent_keys() {
        let config = load("").unwrap();
        assert_eq!((config.suspend_after, config.give_up_after, config.guests), (5, 60, true));
        assert!(config.trust.is_none() && !config.move_root);
        assert!(Config::load(Path::new("/nonexistent")).is_ok());
        assert!(!load("fastpath = false").unwrap().fastpath);
        assert!(!load("hot_calls = false").unwrap().fastpath, "the former name");
        let tree = |text| load(text).unwrap().admin_tree;
        assert_eq!(tree("run_dir = \"/x\""), None, "another node of this machine");
        assert_eq!(tree("run_dir = \"/x\"\nadmin_tree = \"/y\""), Some("/y".into()));
        assert_eq!(tree("admin_tree = \"\""), None);
    }

    #[test]
    fn keys_are_kept_and_written_back() {
        let text = "node = 3\nrun_dir = \"/x\"\nguests = false\ntrust = [1, 2]\n";
        let config = load(text).unwrap();
        assert_eq!(config.run_dir, Path::new("/x"));
        assert_eq!((config.guests, config.trust), (false, Some(vec![NodeId(1), NodeId(2)])));
        assert_eq!(toml::from_str::<File>(&toml::to_string(&config.file).unwrap()).unwrap(), config.file);
    }

    #[test]
    fn invalid_values_are_reported() {
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
            ("admin_tree = \"mosix\"", "absolute path"),
            ("shared = [\"nfs\"]", "absolute paths"),
            ("shared = [\"/nfs/../etc\"]", "absolute paths"),
            ("shared = [\"/nfs/\"]", "absolute paths"),
            ("shared = [\"/\"]", "absolute paths"),
            ("x", "ternd.toml"),
        ] {
            let message = load(text).unwrap_err().to_string();
            assert!(message.contains(part) && !message.contains('\n'), "{text}: {message}");
        }
    }

    #[test]
    fn default_port_is_added() {
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
