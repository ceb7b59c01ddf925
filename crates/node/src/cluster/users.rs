//! Comparison of the user databases of two nodes: between nodes a user is identified by number.

use crate::os::text_file;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Maximum number of users that are compared.
const MAX_USERS: usize = 4096;

/// Maximum length in bytes of a name that is compared.
const MAX_NAME_LEN: usize = 64;

/// The human users of a node: numbers 1000 to 59,999, with name and group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UserList(Vec<User>);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct User {
    name: String,
    uid: u32,
    gid: u32,
}

impl UserList {
    /// The users in this node's `/etc/passwd`; none if it cannot be read.
    pub(crate) fn of_this_node() -> Self {
        Self::parse(&text_file::read_bounded(Path::new("/etc/passwd"), 4 << 20).unwrap_or_default())
    }

    fn parse(passwd: &str) -> Self {
        let user = |line: &str| {
            let mut fields = line.split(':');
            let (name, _password) = (fields.next()?, fields.next()?);
            let (uid, gid) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
            let person = (1000..60_000).contains(&uid) && name.len() <= MAX_NAME_LEN && !name.is_empty();
            person.then(|| User { name: name.into(), uid, gid })
        };
        Self(passwd.lines().filter_map(user).take(MAX_USERS).collect())
    }

    /// Sentences about the differences, at most eight. A user that only one node has is no
    /// difference.
    pub(crate) fn differences_from(&self, other: &Self) -> Vec<String> {
        let names: BTreeMap<_, _> = self.0.iter().map(|user| (user.name.as_str(), user)).collect();
        let numbers: BTreeMap<_, _> = self.0.iter().map(|user| (user.uid, user)).collect();
        let mut differences = Vec::new();
        for theirs in other.0.iter().take(MAX_USERS).filter(|user| user.name.len() <= MAX_NAME_LEN) {
            // The name comes from another node and is shown to people.
            let name: String = theirs.name.chars().filter(|c| !c.is_control()).collect();
            match (names.get(theirs.name.as_str()), numbers.get(&theirs.uid)) {
                (Some(ours), _) if ours.uid != theirs.uid => {
                    differences
                        .push(format!("user {name} is number {} there and {} here", theirs.uid, ours.uid));
                }
                (Some(ours), _) if ours.gid != theirs.gid => {
                    differences
                        .push(format!("user {name} is in group {} there and {} here", theirs.gid, ours.gid));
                }
                (None, Some(ours)) => {
                    differences
                        .push(format!("user number {} is {name} there and {} here", theirs.uid, ours.name));
                }
                _ => {}
            }
        }
        if differences.len() > 8 {
            let more = differences.len() - 7;
            differences.truncate(7);
            differences.push(format!("{more} more users differ"));
        }
        differences
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn human_users_are_read_and_services_are_not() {
        let users = UserList::parse(
            "root:x:0:0::/root:/bin/sh\nanna:x:1000:1000:A:/home/anna:/bin/sh\nbad\n:x:1001:1:",
        );
        assert_eq!(users.0.iter().map(|user| &*user.name).collect::<Vec<_>>(), ["anna"]);
    }

    #[test]
    fn differences_are_reported() {
        let ours = UserList::parse("anna:x:1000:1000::\nbert:x:1001:100::\ncarl:x:1002:100::\n");
        let theirs =
            UserList::parse("anna:x:1005:1000::\nbert:x:1001:101::\ndora:x:1002:100::\nemil:x:1009:1::\n");
        assert_eq!(
            ours.differences_from(&theirs),
            [
                "user anna is number 1005 there and 1000 here",
                "user bert is in group 101 there and 100 here",
                "user number 1002 is dora there and carl here",
            ]
        );
        assert!(ours.differences_from(&ours).is_empty());
    }

    #[test]
    fn many_differences_are_counted_and_control_characters_dropped() {
        let of =
            |at: u32| (1000..1100).map(|id| format!("u{id}\u{1b}:x:{}:1::\n", id + at)).collect::<String>();
        let differences = UserList::parse(&of(0)).differences_from(&UserList::parse(&of(1000)));
        assert_eq!((differences.len(), &*differences[7]), (8, "93 more users differ"));
        assert!(!differences[0].contains('\u{1b}'));
    }
}
