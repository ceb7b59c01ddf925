//! Entry point for fuzzing and tests that feeds the gatekeeper with input of hostile clients:
//! `crates/mexec/fuzz`.

use super::job_task::task;
use super::messages::{ClientJobRequest, ClientPeer, JobLimits, Proof};
use crate::away::job::PeerProtocol;
use std::path::Path;
use tern_node::Config;

/// Parses a client's input. Returns whether it is a proof, the name of a signal, or a job request
/// that would be accepted for the user `nobody`.
///
/// # Panics
/// If a job request would be accepted that must not be.
#[must_use]
pub fn accepts(bytes: &[u8]) -> bool {
    let is_proof = serde_json::from_slice::<Proof>(bytes).is_ok();
    let is_signal = ClientPeer::default().decode_signal(bytes).is_ok();
    let Ok(request) = ClientJobRequest::read(bytes) else { return is_proof || is_signal };
    let summary = request.summary();
    assert!(summary.chars().count() <= 201 && !summary.chars().any(char::is_control), "{summary:?}");
    is_accepted(&request)
}

fn is_accepted(request: &ClientJobRequest) -> bool {
    let (Some(nobody), Ok(config)) =
        (uzers::get_user_by_name("nobody"), Config::load(Path::new("/nonexistent")))
    else {
        return false;
    };
    let Ok((task, credentials)) = task(request, &nobody, &config, &JobLimits { open_files: (10, 20) }) else {
        return false;
    };
    assert!(credentials.uid == nobody.uid() && credentials.gid == nobody.primary_group_id());
    assert!(task.arguments.starts_with(&[b"mexec".to_vec(), b"-g".to_vec(), b"--".to_vec()]));
    assert!(task.directory.starts_with(b"/"));
    let mut words = task.arguments.iter().chain(&task.environment).chain([&task.directory]);
    assert!(words.all(|word| !word.contains(&0)), "a string with a NUL byte");
    for name in [&b"PATH="[..], b"HOME=", b"TERN_RUN_DIR="] {
        let count = task.environment.iter().filter(|pair| pair.starts_with(name)).count();
        assert_eq!(count, 1, "{}", String::from_utf8_lossy(name));
    }
    assert!(!task.environment.iter().any(|pair| pair.starts_with(b"LD_")));
    true
}
