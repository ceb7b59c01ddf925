//! A process is described while it runs, and once more when it has been stopped. A file that it maps
//! may have been written in between.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command};
use tern_image::FileRef;
use tern_image::content::{FilesToIdentify, HomeFiles, Progress};
use tern_image::layout::FileIdentifier;
use tern_tracee::procfs::{self, Mapping};

struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _status = self.0.wait();
    }
}

/// Identifies the file of a mapping, as a worker does.
fn identify(files: &mut HomeFiles, mapping: &Mapping) -> FileRef {
    if files.identify(mapping).is_ok_and(|file| file.is_none()) {
        files.take_unidentified(false).into_iter().for_each(FilesToIdentify::identify);
        assert_eq!(files.collect_identified(), Progress::Done { while_stopped: false });
    }
    assert_eq!(files.collect_identified(), Progress::Idle);
    files.identify(mapping).ok().flatten().expect("it is known")
}

fn mapping_of(pid: i32, file: &str) -> Option<Mapping> {
    procfs::maps(pid).ok()?.into_iter().find(|m| m.name.ends_with(file.as_bytes()))
}

#[test]
fn written_file_is_identified_anew_when_its_process_has_stopped() {
    let dir = std::env::temp_dir().join(format!("tern-changed-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let library = dir.join("library.so");
    // Any library will do: it is only mapped.
    let own = procfs::maps(std::process::id() as i32).unwrap();
    let libc = own.iter().find(|m| m.name.windows(8).any(|part| part == b"/libc.so")).unwrap();
    fs::copy(Path::new(std::str::from_utf8(&libc.name).unwrap()), &library).unwrap();
    let child = Sleeper(Command::new("sleep").arg("100").env("LD_PRELOAD", &library).spawn().unwrap());
    let pid = child.0.id() as i32;
    let mapping = loop {
        if let Some(mapping) = mapping_of(pid, "/library.so") {
            break mapping;
        }
        std::thread::yield_now();
    };
    let mut files = HomeFiles::new(pid, &dir);
    // The program's own file was last written long ago.
    let unchanged = identify(&mut files, &mapping_of(pid, "/sleep").unwrap());
    let before = identify(&mut files, &mapping);
    File::options().append(true).open(&library).unwrap().write_all(b"more").unwrap();
    files.forget_changed();
    assert!(files.by_hash(unchanged.hash).any(|file| file.inode == unchanged.inode));
    assert!(files.by_hash(before.hash).all(|file| file.inode != before.inode), "it was written");
    assert_ne!(identify(&mut files, &mapping).hash, before.hash);
    drop(child);
    fs::remove_dir_all(dir).unwrap();
}

/// A worker may look at a mapping when the process has just removed it. That says nothing about the
/// file, which the process may map again.
#[test]
fn file_that_was_just_unmapped_is_not_unreadable() {
    let dir = std::env::temp_dir().join(format!("tern-unmapped-{}", std::process::id()));
    let child = Sleeper(Command::new("sleep").arg("100").spawn().unwrap());
    let pid = child.0.id() as i32;
    let mapping = loop {
        if let Some(mapping) = mapping_of(pid, "/sleep") {
            break mapping;
        }
        std::thread::yield_now();
    };
    // Nothing is mapped there.
    let unmapped = Mapping { start: 4096, end: 8192, name: b"/nowhere".to_vec(), ..mapping.clone() };
    let forget: [fn(&mut HomeFiles, &Mapping); 2] =
        [HomeFiles::file_mapped, |files, _mapping| files.forget_changed()];
    for forget in [None, Some(forget[0]), Some(forget[1])] {
        let mut files = HomeFiles::new(pid, &dir);
        assert!(files.identify(&unmapped).unwrap().is_none());
        files.take_unidentified(false).unwrap().identify();
        assert_eq!(files.collect_identified(), Progress::Done { while_stopped: false });
        match forget {
            None => assert!(files.identify(&mapping).is_err(), "the description that asked gets the error"),
            Some(forget) => forget(&mut files, &mapping),
        }
        assert_eq!(identify(&mut files, &mapping).inode, mapping.inode);
    }
    fs::remove_dir_all(dir).unwrap();
}
