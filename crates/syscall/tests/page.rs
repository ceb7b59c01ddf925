//! The committed page must match the generated one.

#[test]
fn docs_syscalls_md_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/syscalls.md");
    let committed = std::fs::read_to_string(path).expect("docs/reference/syscalls.md");
    let same = committed == tern_syscall::markdown();
    assert!(same, "docs/reference/syscalls.md is not what the table says; run make docs, and commit it");
}
