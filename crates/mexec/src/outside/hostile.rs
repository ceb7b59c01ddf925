//! What a client may say, or who pretends to be one, as the fuzz target `outside` and the tests have it said: `crates/mexec/fuzz`.

use super::order::task;
use super::words::{FromOutside, Limits, Order, Proof};
use crate::away::job::Dialect;
use std::path::Path;
use tern_node::Config;

/// Whether this is a proof, the name of a signal, or an order that would be carried out for nobody.
///
/// # Panics
/// If an order would be carried out that must not be.
#[must_use]
pub fn hears(bytes: &[u8]) -> bool {
    let is_proof = serde_json::from_slice::<Proof>(bytes).is_ok();
    let is_signal = FromOutside::default().signal(bytes).is_ok();
    let Ok(order) = Order::read(bytes) else { return is_proof || is_signal };
    let shown = order.shown();
    assert!(shown.chars().count() <= 201 && !shown.chars().any(char::is_control), "{shown:?}");
    is_within_bounds(&order)
}

fn is_within_bounds(order: &Order) -> bool {
    let (Some(nobody), Ok(config)) =
        (uzers::get_user_by_name("nobody"), Config::load(Path::new("/nonexistent")))
    else {
        return false;
    };
    let Ok((task, who)) = task(order, &nobody, &config, &Limits { files: (10, 20) }) else { return false };
    assert!(who.uid == nobody.uid() && who.gid == nobody.primary_group_id());
    assert!(task.arguments.starts_with(&[b"mexec".to_vec(), b"-g".to_vec(), b"--".to_vec()]));
    assert!(task.directory.starts_with(b"/"));
    let mut words = task.arguments.iter().chain(&task.environment).chain([&task.directory]);
    assert!(words.all(|word| !word.contains(&0)), "a word that ends early");
    for name in [&b"PATH="[..], b"HOME=", b"TERN_RUN_DIR="] {
        let count = task.environment.iter().filter(|pair| pair.starts_with(name)).count();
        assert_eq!(count, 1, "{}", String::from_utf8_lossy(name));
    }
    assert!(!task.environment.iter().any(|pair| pair.starts_with(b"LD_")));
    true
}
