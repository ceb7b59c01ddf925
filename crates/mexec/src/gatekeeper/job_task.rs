//! Builds the task of a client's job: from the client's request, after checking it, and from this
//! node's user database.

use super::client_keys::ClientKey;
use super::messages::{ClientJobRequest, JobLimits};
use crate::messages::{StartFailure, Task};
use anyhow::{Context, Result, bail};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use tern_control::{Refusal, RefusalKind};
use tern_ids::Credentials;
use tern_node::Config;
use uzers::User;
use uzers::os::unix::UserExt;

/// The PATH of jobs, for users and for root, as login(1) sets it.
const USER_PATH: &str = "/usr/local/bin:/usr/bin:/bin";
const ROOT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The maximum number of variables, and the maximum length of a value in bytes.
const MAX_VARIABLES: usize = 256;
const MAX_VALUE_LEN: usize = 128 << 10;

/// Variables that a client must not set. The gatekeeper sets them itself; or mexec, its loader or
/// the C library would heed them on this node before the command is placed; or a shell would heed
/// them before it runs its command. A client can use `env NAME=VALUE COMMAND`, which takes effect
/// where the command runs, as its user.
const DENIED_VARIABLES: [&str; 24] = [
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

/// Prefixes of further such variables.
const DENIED_PREFIXES: [&str; 6] = ["LD_", "GLIBC_", "MALLOC_", "TERN_", "BASH_FUNC", "RUST_"];

/// The user that a client's jobs run as, from this node's user database.
pub(super) fn user(key: &ClientKey) -> Result<User> {
    let name = &key.user;
    let user =
        uzers::get_user_by_name(name).with_context(|| format!("the gatekeeper knows no user {name}"))?;
    // Compared by number, since root may have other names.
    if user.uid() == 0 && !key.root {
        bail!("this key is not for root");
    }
    Ok(user)
}

/// Checks whether jobs of a key may run as this user.
///
/// # Errors
/// If this node has no such user, or the user is root and `root` is false.
pub fn check_user(name: &str, root: bool) -> Result<(), Refusal> {
    let Some(user) = uzers::get_user_by_name(name) else {
        return Err(Refusal::new(RefusalKind::NotFound, format!("this node has no user {name}")));
    };
    if user.uid() == 0 && !root {
        let message = format!("{name} is root: a client with the key could do anything here");
        return Err(Refusal::new(RefusalKind::NotAllowed, message).hint("--root, if that is meant"));
    }
    Ok(())
}

/// The task for a client's request: mexec, running the command as that user.
pub(super) fn task(
    request: &ClientJobRequest,
    user: &User,
    config: &Config,
    limits: &JobLimits,
) -> Result<(Task, Credentials)> {
    let groups = uzers::get_user_groups(user.name(), user.primary_group_id());
    let groups = groups.context("the user's groups are not known")?.iter().map(uzers::Group::gid).collect();
    let credentials = Credentials { uid: user.uid(), gid: user.primary_group_id(), groups };
    let home = user.home_dir();
    let directory = request.directory.as_ref().map_or_else(
        || home.to_owned(),
        |directory| home.join(Path::new(std::ffi::OsStr::from_bytes(&directory.0))),
    );
    if !directory.is_absolute() {
        bail!("{} has no home directory", user.name().display());
    }
    let program = config.exec.with_file_name("tern");
    let mexec = [&b"mexec"[..], b"-g", b"--"].map(<[u8]>::to_vec);
    let words = request.argv.iter().map(|word| word.0.clone());
    Ok((
        Task {
            program: program.into_os_string().as_bytes().to_vec(),
            arguments: mexec.into_iter().chain(words).collect(),
            environment: environment(request, user, config)?,
            directory: directory.as_os_str().as_bytes().to_vec(),
            umask: 0o022,
            limits: vec![(libc::RLIMIT_NOFILE, limits.open_files.0, limits.open_files.1)],
            nice: 0,
            ignored_signals: 0,
            blocked_signals: 0,
            pid: 0,
            terminal: None,
            forwards_stdin: request.input,
            merges_stderr: request.joined,
            private_tmp: false,
        },
        credentials,
    ))
}

fn environment(request: &ClientJobRequest, user: &User, config: &Config) -> Result<Vec<Vec<u8>>> {
    let path = if user.uid() == 0 { ROOT_PATH } else { USER_PATH };
    let pair = |name: &str, value: &[u8]| [name.as_bytes(), b"=", value].concat();
    let mut environment = vec![
        pair("HOME", user.home_dir().as_os_str().as_bytes()),
        pair("USER", user.name().as_bytes()),
        pair("LOGNAME", user.name().as_bytes()),
        pair("SHELL", user.shell().as_os_str().as_bytes()),
        pair("PATH", path.as_bytes()),
        pair("TERN_RUN_DIR", config.run_dir.as_os_str().as_bytes()),
    ];
    if request.environment.len() > MAX_VARIABLES {
        bail!("more than {MAX_VARIABLES} variables");
    }
    for (name, value) in &request.environment {
        check_variable(name)?;
        if value.0.len() > MAX_VALUE_LEN {
            bail!("{name} is longer than {MAX_VALUE_LEN} bytes");
        }
        environment.push(pair(name, &value.0));
    }
    Ok(environment)
}

/// Fails if a client must not set this variable.
fn check_variable(name: &str) -> Result<()> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let is_name = (1..=128).contains(&name.len())
        && name.chars().all(is_allowed)
        && !name.starts_with(|c: char| c.is_ascii_digit());
    if !is_name {
        bail!("{:?} is no name of a variable", name.chars().take(64).collect::<String>());
    }
    if DENIED_VARIABLES.contains(&name) || DENIED_PREFIXES.iter().any(|prefix| name.starts_with(prefix)) {
        bail!("{name} is not for a client to set");
    }
    Ok(())
}

/// The message for a job that could not be started.
pub(super) fn start_failure(what: StartFailure, errno: i32) -> String {
    let error = io::Error::from_raw_os_error(errno);
    match what {
        StartFailure::Directory => format!("the user of the job cannot enter the directory: {error}"),
        StartFailure::Program => format!("the gatekeeper has no mexec: {error}"),
        StartFailure::Setup => format!("the job cannot be started: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_may_set_harmless_variables_only() {
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
    fn root_must_be_allowed_and_unknown_users_are_refused() {
        assert!(user(&ClientKey::of("root")).unwrap_err().to_string().contains("not for root"));
        assert_eq!(user(&ClientKey { root: true, ..ClientKey::of("root") }).unwrap().uid(), 0);
        assert!(user(&ClientKey::of("no-such-user")).is_err());
    }

    #[test]
    fn job_runs_as_the_user_of_its_key() {
        let nobody = uzers::get_user_by_name("nobody").unwrap();
        let config = Config::load(Path::new("/nonexistent")).unwrap();
        let json = r#"{"argv": ["-n", "2"], "environment": {"LANG": "C"}, "directory": "/tmp"}"#;
        let request = ClientJobRequest::read(json.as_bytes()).unwrap();
        let (task, credentials) =
            task(&request, &nobody, &config, &JobLimits { open_files: (10, 20) }).unwrap();
        assert_eq!((credentials.uid, credentials.gid), (nobody.uid(), nobody.primary_group_id()));
        let words: Vec<_> = task.arguments.iter().map(|word| String::from_utf8_lossy(word)).collect();
        assert_eq!(words, ["mexec", "-g", "--", "-n", "2"], "no option of mexec's");
        assert!(
            task.environment.contains(&b"LANG=C".to_vec())
                && task.environment.contains(&b"USER=nobody".to_vec())
        );
        assert_eq!(task.directory, b"/tmp");
    }
}
