//! Names of users, from the system's file; who is not in it is shown by number.

use std::collections::HashMap;

/// Names by number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Users(HashMap<u32, String>);

impl Users {
    /// Those of this machine.
    #[must_use]
    pub fn of_this_machine() -> Self {
        Self::read(&std::fs::read_to_string("/etc/passwd").unwrap_or_default())
    }

    /// Those in a text of the form of `/etc/passwd`.
    #[must_use]
    pub fn read(text: &str) -> Self {
        let mut names = HashMap::new();
        for line in text.lines() {
            let mut fields = line.split(':');
            if let (Some(name), _, Some(Ok(uid))) =
                (fields.next(), fields.next(), fields.next().map(str::parse))
            {
                // The first name of a number is its name.
                names.entry(uid).or_insert_with(|| name.to_owned());
            }
        }
        Self(names)
    }

    /// What to call a user.
    #[must_use]
    pub fn name(&self, uid: u32) -> String {
        self.0.get(&uid).cloned().unwrap_or_else(|| uid.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_name_of_a_number_is_its_name() {
        let users =
            Users::read("root:x:0:0::/:/bin/sh\ntoor:x:0:0::/:/bin/sh\n+::::::\nbad\nann:x:1000:1::/:/x\n");
        assert_eq!([0, 1000, 7].map(|uid| users.name(uid)), ["root", "ann", "7"]);
    }
}
