//! What a client's job is to be: his words, within what he may say, and the rest from this node's database of users.

use super::clients::Client;
use super::words::{Limits, Order};
use crate::words::{Failed, Task, Who};
use anyhow::{Context, Result, bail};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use tern_control::{Refusal, RefusalKind};
use tern_node::Config;
use uzers::User;
use uzers::os::unix::UserExt;

/// Where programs are found, for a user and for root, as login has it.
const PATH: &str = "/usr/local/bin:/usr/bin:/bin";
const ROOTS_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The most variables, and the longest value.
const MOST_VARIABLES: usize = 256;
const MOST_VALUE: usize = 128 << 10;

/// Variables that are never a client's. They are ours to set; or mexec itself, its loader or the C library would heed them on this node
/// before anything else is decided; or a shell would, before it comes to what it was asked for. Whoever wants one of these for his command
/// says `env NAME=VALUE COMMAND`: that is the user's own business, where the command runs.
const NOT_HIS: [&str; 24] = [
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "PATH",
    "MAIL",
    "PWD",
    "OLDPWD",
    "GCONV_PATH",
    "GETCONF_DIR",
    "HOSTALIASES",
    "LOCALDOMAIN",
    "LOCPATH",
    "NLSPATH",
    "RES_OPTIONS",
    "RESOLV_HOST_CONF",
    "TZDIR",
    "BASH_ENV",
    "ENV",
    "IFS",
    "SHELLOPTS",
    "BASHOPTS",
    "XDG_RUNTIME_DIR",
    "SSH_AUTH_SOCK",
];

/// Variables that begin so are not, either.
const NOT_HIS_FROM: [&str; 6] = ["LD_", "GLIBC_", "MALLOC_", "TERN_", "BASH_FUNC", "RUST_"];

/// The user as whom a client's jobs run, as this node knows him now.
pub(super) fn user(client: &Client) -> Result<User> {
    let name = &client.user;
    let user =
        uzers::get_user_by_name(name).with_context(|| format!("the gatekeeper knows no user {name}"))?;
    // By his number: root has other names, too.
    if user.uid() == 0 && !client.root {
        bail!("this key is not for root");
    }
    Ok(user)
}

/// Passes if jobs of a key could run as this user.
///
/// # Errors
/// If this node has no such user, or he is root and that is not meant.
pub fn check_user(name: &str, root: bool) -> Result<(), Refusal> {
    let Some(user) = uzers::get_user_by_name(name) else {
        return Err(Refusal::new(RefusalKind::NotFound, format!("this node has no user {name}")));
    };
    if user.uid() == 0 && !root {
        let said = format!("{name} is root: who has the key could do anything here");
        return Err(Refusal::new(RefusalKind::NotAllowed, said).hint("--root, if that is meant"));
    }
    Ok(())
}

/// What is begun for this order: mexec, as that user, with the command.
pub(super) fn task(order: &Order, user: &User, config: &Config, limits: &Limits) -> Result<(Task, Who)> {
    let groups = uzers::get_user_groups(user.name(), user.primary_group_id());
    let groups = groups.context("his groups are not known")?.iter().map(uzers::Group::gid).collect();
    let who = Who { uid: user.uid(), gid: user.primary_group_id(), groups };
    let home = user.home_dir();
    let directory = order.directory.as_ref().map_or_else(
        || home.to_owned(),
        |directory| home.join(Path::new(std::ffi::OsStr::from_bytes(&directory.0))),
    );
    if !directory.is_absolute() {
        bail!("{} has no home to begin in", user.name().display());
    }
    let program = config.exec.with_file_name("tern");
    let own = [&b"mexec"[..], b"-g", b"--"].map(<[u8]>::to_vec);
    let words = order.argv.iter().map(|word| word.0.clone());
    Ok((
        Task {
            program: program.into_os_string().as_bytes().to_vec(),
            arguments: own.into_iter().chain(words).collect(),
            environment: environment(order, user, config)?,
            directory: directory.as_os_str().as_bytes().to_vec(),
            umask: 0o022,
            limits: vec![(libc::RLIMIT_NOFILE, limits.files.0, limits.files.1)],
            nice: 0,
            signals: (0, 0),
            pid: 0,
            terminal: None,
            input: order.input,
            joined: order.joined,
            scratch: false,
        },
        who,
    ))
}

fn environment(order: &Order, user: &User, config: &Config) -> Result<Vec<Vec<u8>>> {
    let path = if user.uid() == 0 { ROOTS_PATH } else { PATH };
    let pair = |name: &str, value: &[u8]| [name.as_bytes(), b"=", value].concat();
    let mut environment = vec![
        pair("HOME", user.home_dir().as_os_str().as_bytes()),
        pair("USER", user.name().as_bytes()),
        pair("LOGNAME", user.name().as_bytes()),
        pair("SHELL", user.shell().as_os_str().as_bytes()),
        pair("PATH", path.as_bytes()),
        pair("TERN_RUN_DIR", config.run_dir.as_os_str().as_bytes()),
    ];
    if order.environment.len() > MOST_VARIABLES {
        bail!("more than {MOST_VARIABLES} variables");
    }
    for (name, value) in &order.environment {
        check_variable(name)?;
        if value.0.len() > MOST_VALUE {
            bail!("{name} is longer than {MOST_VALUE} bytes");
        }
        environment.push(pair(name, &value.0));
    }
    Ok(environment)
}

/// Passes if a client may set this variable.
fn check_variable(name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_name = (1..=128).contains(&name.len())
        && name.chars().all(plain)
        && !name.starts_with(|c: char| c.is_ascii_digit());
    if !is_name {
        bail!("{:?} is no name of a variable", name.chars().take(64).collect::<String>());
    }
    if NOT_HIS.contains(&name) || NOT_HIS_FROM.iter().any(|prefix| name.starts_with(prefix)) {
        bail!("{name} is not for a client to set");
    }
    Ok(())
}

/// Why a job could not be begun.
pub(super) fn not_started(what: Failed, errno: i32) -> String {
    let error = io::Error::from_raw_os_error(errno);
    match what {
        Failed::Directory => format!("the directory cannot be entered by its user: {error}"),
        Failed::Program => format!("the gatekeeper has no mexec: {error}"),
        Failed::Setting => format!("the job cannot be begun: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_set_what_is_theirs() {
        for name in ["LANG", "LC_ALL", "TZ", "TERM", "CFLAGS", "_x", "A1", "path", "LDFLAGS", "PYTHONPATH"] {
            assert!(check_variable(name).is_ok(), "{name}");
        }
        for name in [
            "",
            "1A",
            "A B",
            "A=B",
            "A\n",
            "ä",
            "LD_PRELOAD",
            "LD_LIBRARY_PATH",
            "GLIBC_TUNABLES",
            "PATH",
            "HOME",
            "IFS",
            "BASH_ENV",
            "ENV",
            "TERN_RUN_DIR",
            "XDG_RUNTIME_DIR",
            "BASH_FUNC_ls%%",
            "GCONV_PATH",
        ] {
            assert!(check_variable(name).is_err(), "{name}");
        }
    }

    #[test]
    fn root_is_said_and_nobody_is_nobody() {
        assert!(user(&Client::of("root")).unwrap_err().to_string().contains("not for root"));
        assert_eq!(user(&Client { root: true, ..Client::of("root") }).unwrap().uid(), 0);
        assert!(user(&Client::of("no-such-user")).is_err());
    }

    #[test]
    fn a_job_is_its_user_s_whatever_is_said() {
        let nobody = uzers::get_user_by_name("nobody").unwrap();
        let config = Config::load(Path::new("/nonexistent")).unwrap();
        let order = r#"{"argv": ["-n", "2"], "environment": {"LANG": "C"}, "directory": "/tmp"}"#;
        let order = Order::read(order.as_bytes()).unwrap();
        let (task, who) = task(&order, &nobody, &config, &Limits { files: (10, 20) }).unwrap();
        assert_eq!((who.uid, who.gid), (nobody.uid(), nobody.primary_group_id()));
        let words: Vec<_> = task.arguments.iter().map(|word| String::from_utf8_lossy(word)).collect();
        assert_eq!(words, ["mexec", "-g", "--", "-n", "2"], "no option of mexec's");
        assert!(
            task.environment.contains(&b"LANG=C".to_vec())
                && task.environment.contains(&b"USER=nobody".to_vec())
        );
        assert_eq!(task.directory, b"/tmp");
    }
}
