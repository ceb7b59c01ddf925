//! The kernel's version, for features that cannot be tried.

use super::Finding;

/// A kernel release: major, minor and patch number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Release(u32, u32, u32);

impl Release {
    /// Parses a text such as `6.12.53-cloud-amd64`; missing parts are 0.
    fn parse(text: &str) -> Self {
        let mut parts = text.split(['.', '-', '+']).map(|part| part.parse().unwrap_or(0));
        let mut next = || parts.next().unwrap_or(0);
        Self(next(), next(), next())
    }

    /// The race in SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV: a reply that is sent too early is lost.
    /// It is fixed in 6.18 (cce436aafc2a), and in the stable releases of October 2025.
    fn reply_race(self) -> ReplyRace {
        let Self(major, minor, patch) = self;
        match (major, minor) {
            _ if self >= Self(6, 17, 3) => ReplyRace::Fixed,
            (6, 12) if patch >= 53 => ReplyRace::Fixed,
            (6, 6) if patch >= 112 => ReplyRace::Fixed,
            (6, 1) if patch >= 156 => ReplyRace::Fixed,
            // Older than the flag.
            _ if self < Self(5, 19, 0) => ReplyRace::NoFlag,
            _ => ReplyRace::Present,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReplyRace {
    Fixed,
    Present,
    NoFlag,
}

/// The running kernel's release as text.
fn release_text() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

pub(super) fn probe() -> Vec<Finding> {
    let text = release_text();
    let release = Release::parse(&text);
    vec![version(release, &text), reply_race(release, &text), architecture()]
}

fn version(release: Release, text: &str) -> Finding {
    let name = "kernel version";
    if release < Release(5, 10, 0) {
        Finding::missing(
            name,
            text,
            "older than 5.10: this node can neither be a home nor host guests; update the kernel",
        )
    } else if release < Release(5, 19, 0) {
        Finding::limited(name, text, "older than 5.19: processes can leave this node, but it hosts no guests")
    } else if release < Release(6, 7, 0) {
        Finding::limited(
            name,
            text,
            "older than 6.7: written pages are found less efficiently, so processes are frozen longer when they move",
        )
    } else {
        Finding::ok(name, text)
    }
}

fn reply_race(release: Release, text: &str) -> Finding {
    let name = "seccomp reply race";
    let follows = "a guest's system call can hang if the reply is sent very early; update to 6.17.3, 6.12.53, 6.6.112 or 6.1.156";
    match release.reply_race() {
        ReplyRace::Fixed => Finding::ok(name, format!("fixed in {text}")),
        ReplyRace::Present => Finding::limited(name, format!("not fixed in {text}"), follows),
        ReplyRace::NoFlag => Finding::limited(
            name,
            format!("{text} has no such flag"),
            "this node hosts no guests; it needs kernel 5.19",
        ),
    }
}

fn architecture() -> Finding {
    let name = "architecture";
    match rustix::system::uname().machine().to_string_lossy() {
        machine if machine == "x86_64" => Finding::ok(name, machine),
        machine => Finding::missing(name, machine, "Tern moves processes only between x86-64 nodes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::FindingState;

    #[test]
    fn releases_compare_numerically() {
        assert_eq!(Release::parse("6.18.44-fc-v657"), Release(6, 18, 44));
        assert_eq!(Release::parse("6.1-rc3"), Release(6, 1, 0));
        assert!(Release::parse("5.9.1") < Release::parse("5.15"));
    }

    #[test]
    fn minimum_releases_for_home_and_host() {
        let state = |text| version(Release::parse(text), text).state;
        assert_eq!(state("5.9.16"), FindingState::Missing);
        assert_eq!(state("5.10.200"), FindingState::Limited);
        assert_eq!(state("5.15.1"), FindingState::Limited);
        assert_eq!(state("6.6.1"), FindingState::Limited);
        assert_eq!(state("6.7.0"), FindingState::Ok);
    }

    #[test]
    fn reply_race_depends_on_release() {
        let race = |text| Release::parse(text).reply_race();
        assert_eq!(race("6.18.0"), ReplyRace::Fixed);
        assert_eq!(race("6.17.3"), ReplyRace::Fixed);
        assert_eq!(race("6.17.2"), ReplyRace::Present);
        assert_eq!(race("6.12.53"), ReplyRace::Fixed);
        assert_eq!(race("6.12.52"), ReplyRace::Present);
        assert_eq!(race("6.14.9"), ReplyRace::Present);
        assert_eq!(race("6.6.112"), ReplyRace::Fixed);
        assert_eq!(race("6.1.155"), ReplyRace::Present);
        assert_eq!(race("5.15.0"), ReplyRace::NoFlag);
    }
}
