//! User names from /etc/passwd; a user that is not in it is shown by number.

use std::collections::HashMap;

/// User names by uid.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UserNames(HashMap<u32, String>);

impl UserNames {
    /// The users of this machine.
    #[must_use]
    pub fn from_passwd() -> Self {
        Self::parse(&std::fs::read_to_string("/etc/passwd").unwrap_or_default())
    }

    /// Parses text in the format of `/etc/passwd`.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut names = HashMap::new();
        for line in text.lines() {
            let mut fields = line.split(':');
            if let (Some(name), _, Some(Ok(uid))) =
                (fields.next(), fields.next(), fields.next().map(str::parse))
            {
                // The first name of a uid is used.
                names.entry(uid).or_insert_with(|| name.to_owned());
            }
        }
        Self(names)
    }

    /// The name of a user, or the uid.
    #[must_use]
    pub fn name(&self, uid: u32) -> String {
        self.0.get(&uid).cloned().unwrap_or_else(|| uid.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_name_of_a_uid_is_used() {
        let users = UserNames::parse(
            "root:x:0:0::/:/bin/sh\ntoor:x:0:0::/:/bin/sh\n+::::::\nbad\nann:x:1000:1::/:/x\n",
        );
        assert_eq!([0, 1000, 7].map(|uid| users.name(uid)), ["root", "ann", "7"]);
    }
}
