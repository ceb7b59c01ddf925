//! The users of a node, compared with another's: between nodes a user is a number.

use crate::files;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// The most users that are compared.
const MOST: usize = 4096;

/// Longest name that is compared.
const MOST_NAME: usize = 64;

/// The people of a node: user numbers 1000 to 59,999, with name and group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Users(Vec<User>);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct User {
    name: String,
    uid: u32,
    gid: u32,
}

impl Users {
    /// Those of this node's `/etc/passwd`; none if it cannot be read.
    pub fn of_this_node() -> Self {
        Self::parse(&files::read_bounded(Path::new("/etc/passwd"), 4 << 20).unwrap_or_default())
    }

    fn parse(passwd: &str) -> Self {
        let user = |line: &str| {
            let mut fields = line.split(':');
            let (name, _password) = (fields.next()?, fields.next()?);
            let (uid, gid) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
            let person = (1000..60_000).contains(&uid) && name.len() <= MOST_NAME && !name.is_empty();
            person.then(|| User { name: name.into(), uid, gid })
        };
        Self(passwd.lines().filter_map(user).take(MOST).collect())
    }

    /// Sentences about what differs, at most eight. Users that only one node has are no mistake.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let names: BTreeMap<_, _> = self.0.iter().map(|user| (user.name.as_str(), user)).collect();
        let numbers: BTreeMap<_, _> = self.0.iter().map(|user| (user.uid, user)).collect();
        let mut said = Vec::new();
        for theirs in other.0.iter().take(MOST).filter(|user| user.name.len() <= MOST_NAME) {
            // What another node says is shown to people.
            let name: String = theirs.name.chars().filter(|c| !c.is_control()).collect();
            match (names.get(theirs.name.as_str()), numbers.get(&theirs.uid)) {
                (Some(ours), _) if ours.uid != theirs.uid => {
                    said.push(format!("user {name} is number {} there and {} here", theirs.uid, ours.uid));
                }
                (Some(ours), _) if ours.gid != theirs.gid => {
                    said.push(format!("user {name} is in group {} there and {} here", theirs.gid, ours.gid));
                }
                (None, Some(ours)) => {
                    said.push(format!("user number {} is {name} there and {} here", theirs.uid, ours.name));
                }
                _ => {}
            }
        }
        if said.len() > 8 {
            let more = said.len() - 7;
            said.truncate(7);
            said.push(format!("{more} more users differ"));
        }
        said
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_are_read_and_services_are_not() {
        let users =
            Users::parse("root:x:0:0::/root:/bin/sh\nanna:x:1000:1000:A:/home/anna:/bin/sh\nbad\n:x:1001:1:");
        assert_eq!(users.0.iter().map(|user| &*user.name).collect::<Vec<_>>(), ["anna"]);
    }

    #[test]
    fn what_differs_is_said() {
        let ours = Users::parse("anna:x:1000:1000::\nbert:x:1001:100::\ncarl:x:1002:100::\n");
        let theirs =
            Users::parse("anna:x:1005:1000::\nbert:x:1001:101::\ndora:x:1002:100::\nemil:x:1009:1::\n");
        assert_eq!(
            ours.differences(&theirs),
            [
                "user anna is number 1005 there and 1000 here",
                "user bert is in group 101 there and 100 here",
                "user number 1002 is dora there and carl here",
            ]
        );
        assert!(ours.differences(&ours).is_empty());
    }

    #[test]
    fn many_differences_are_counted_and_control_characters_dropped() {
        let of =
            |at: u32| (1000..1100).map(|id| format!("u{id}\u{1b}:x:{}:1::\n", id + at)).collect::<String>();
        let said = Users::parse(&of(0)).differences(&Users::parse(&of(1000)));
        assert_eq!((said.len(), &*said[7]), (8, "93 more users differ"));
        assert!(!said[0].contains('\u{1b}'));
    }
}
