//! The names in the tree's root: nodes by number, and links to nodes.

use tern_ids::NodeId;

/// A link in the tree's root that refers to a node, which may depend on the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RootLink {
    /// The node where the calling process runs.
    Here,
    /// The home of the calling process.
    Home,
    /// The node that the process has selected.
    Selected,
    /// The node where the process creates files now, or created the last one.
    Magic,
    /// The node where the process executed its program.
    LastExec,
    /// The administration tree, which belongs to no node.
    Admin,
    /// This node's own files, which are `/` (docs/design/own-files.md).
    OwnFiles,
    /// A node by its name; this node as `0`.
    Node(NodeId),
}

/// First inode number of links to nodes. No file of a node has an inode number in this range.
const FIRST_NODE_LINK: u64 = 1 << 20;

impl RootLink {
    /// The links that depend on the caller and the link to the administration tree, with their
    /// names.
    pub(crate) const NAMED: [(Self, &'static str); 6] = [
        (Self::Here, "here"),
        (Self::Home, "home"),
        (Self::Selected, "selected"),
        (Self::Magic, "magic"),
        (Self::LastExec, "lastexec"),
        (Self::Admin, ".mosix"),
    ];

    /// The link's inode number.
    pub(crate) fn number(self) -> u64 {
        match self {
            Self::Here => 2,
            Self::Home => 3,
            Self::Selected => 4,
            Self::Magic => 5,
            Self::LastExec => 6,
            Self::Admin => 7,
            Self::OwnFiles => 8,
            Self::Node(node) => FIRST_NODE_LINK + u64::from(node.0),
        }
    }

    /// The link with this inode number.
    pub(crate) fn of(number: u64) -> Option<Self> {
        let named = Self::NAMED.into_iter().map(|(link, _)| link).chain([Self::OwnFiles]);
        named.into_iter().find(|link| link.number() == number).or_else(|| {
            u16::try_from(number.checked_sub(FIRST_NODE_LINK)?).ok().map(|node| Self::Node(NodeId(node)))
        })
    }
}

/// The meaning of a name in the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RootName {
    /// A node's number: the directory with its files, requested from its server.
    Node(NodeId),
    /// One of the links.
    Link(RootLink),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_have_numbers_of_their_own() {
        let named = RootLink::NAMED.into_iter().map(|(link, _)| link);
        let nodes = [1, u16::MAX].map(|node| RootLink::Node(NodeId(node)));
        for link in named.chain([RootLink::OwnFiles]).chain(nodes) {
            assert_eq!(RootLink::of(link.number()), Some(link));
        }
        for number in [0, 1, 9, FIRST_NODE_LINK - 1, FIRST_NODE_LINK + 65_536, 1 << 61] {
            assert_eq!(RootLink::of(number), None, "{number}");
        }
    }
}
