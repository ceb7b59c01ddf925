//! Whether the files of other nodes can be shown here.

use super::Finding;
use crate::output::reason;
use std::fs::{File, OpenOptions};
use std::io;

pub(super) fn examine() -> Vec<Finding> {
    vec![mfs(OpenOptions::new().read(true).write(true).open("/dev/fuse"))]
}

fn mfs(fuse: io::Result<File>) -> Finding {
    let name = "/mfs";
    match fuse {
        Ok(_) => Finding::ok(name, "FUSE: the files of other nodes can be mounted"),
        Err(error) => {
            let follows = "no /mfs on this node, which serves its own files all the same; try: modprobe fuse";
            Finding::limited(name, format!("cannot open /dev/fuse: {}", reason(&error)), follows)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn without_fuse_there_is_no_tree() {
        assert_eq!(mfs(Err(io::ErrorKind::NotFound.into())).state, State::Limited);
        assert_eq!(mfs(File::open("/dev/null")).state, State::Ok);
    }
}
