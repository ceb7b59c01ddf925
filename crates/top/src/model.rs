//! All that is shown, and nothing of how.

pub mod list;
pub mod prompt;

use crate::appearance::Appearance;
use crate::ask::Trouble;
use crate::users::Users;
use list::List;
use prompt::Prompt;
use std::collections::BTreeMap;
use std::time::Duration;
use tern_control::{ClusterReport, NodeLoad, NodeState};
use tern_ids::NodeId;

/// What the bars say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Display {
    /// 1 is one standard CPU kept busy.
    #[default]
    Load,
    /// The same, each doubling the same height.
    LogLoad,
    /// Of one CPU; 10,000 is the standard.
    Speed,
    /// What is used, and what a newcomer could have.
    Memory,
    /// What is used, caches included, and what is not.
    RawMemory,
    /// Percent of the time that does not go into waiting for paging.
    Utilisability,
}

/// How wide a node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Width {
    /// The first of the others in which all nodes fit; else the last.
    #[default]
    Auto,
    /// Numbers beside each other, and the value above the bar.
    Wide,
    /// Numbers are written downwards.
    Vertical,
    /// And there is no space between bars.
    Tight,
}

/// What the command line says and keys change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Settings {
    /// What the bars say.
    pub display: Display,
    /// How wide a node is.
    pub width: Width,
    /// Show also nodes that are dead, and those never heard of.
    pub dead: bool,
    /// Show the cluster's totals.
    pub totals: bool,
    /// The first node shown, or the next after it.
    pub first: Option<NodeId>,
}

/// What is known of the cluster, and since when.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Knowledge {
    /// The last answer.
    pub report: Option<ClusterReport>,
    /// When that came.
    pub heard: Duration,
    /// Why the last question was not answered.
    pub trouble: Option<Trouble>,
    /// When the question was asked that is not answered yet.
    pub asked: Option<Duration>,
    /// When a question was last asked.
    pub last_asked: Option<Duration>,
}

/// The line for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// What is said.
    pub text: String,
    /// Whether something went wrong.
    pub bad: bool,
}

/// How often the cluster is asked, from the fastest to the slowest.
pub const PACES: [Duration; 5] = [
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
];

/// Everything.
#[derive(Debug, Clone)]
pub struct Model {
    /// What the terminal can show.
    pub appearance: Appearance,
    /// Its columns and rows.
    pub size: (u16, u16),
    /// Time since the start.
    pub now: Duration,
    /// What is shown, and how.
    pub settings: Settings,
    /// How often the cluster is asked.
    pub pace: Duration,
    /// The cluster.
    pub cluster: Knowledge,
    /// Of this node's placed commands, how many each node runs, and how many wait (of no node).
    pub placed: BTreeMap<Option<NodeId>, u32>,
    /// The node that the arrows are on.
    pub chosen: Option<NodeId>,
    /// The processes of a node, if they are shown.
    pub list: Option<List>,
    /// Whether the list is all there is (`mtop`), so that leaving it is leaving.
    pub only_list: bool,
    /// The first line of the help, if that is shown.
    pub help: Option<usize>,
    /// What is being typed.
    pub prompt: Option<Prompt>,
    /// What there is to say.
    pub message: Option<Message>,
    /// Names of users.
    pub users: Users,
    /// Whether anybody can press keys: not on paper.
    pub keys: bool,
}

impl Model {
    /// A model that knows nothing yet.
    #[must_use]
    pub fn new(appearance: Appearance, settings: Settings, users: Users) -> Self {
        Self {
            appearance,
            size: (80, 24),
            now: Duration::ZERO,
            settings,
            pace: PACES[1],
            cluster: Knowledge::default(),
            placed: BTreeMap::new(),
            chosen: None,
            list: None,
            only_list: false,
            help: None,
            prompt: None,
            message: None,
            users,
            keys: true,
        }
    }

    /// All nodes of the cluster.
    #[must_use]
    pub fn nodes(&self) -> &[NodeLoad] {
        self.cluster.report.as_ref().map_or(&[], |report| &report.nodes)
    }

    /// Those that have a column.
    #[must_use]
    pub fn shown(&self) -> Vec<&NodeLoad> {
        self.nodes().iter().filter(|node| self.settings.dead || is_up(node)).collect()
    }

    /// This node, if its daemon has said so.
    #[must_use]
    pub fn me(&self) -> Option<NodeId> {
        self.cluster.report.as_ref().map(|report| report.me)
    }

    /// What is known of a node.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&NodeLoad> {
        self.nodes().iter().find(|node| node.node == id)
    }

    /// Says something.
    pub fn say(&mut self, text: impl Into<String>) {
        self.message = Some(Message { text: text.into(), bad: false });
    }

    /// Says what went wrong.
    pub fn complain(&mut self, trouble: &Trouble) {
        let hint = trouble.hint.as_ref().map(|hint| format!("; try: {hint}")).unwrap_or_default();
        self.message = Some(Message { text: format!("{}{hint}", trouble.message), bad: true });
    }
}

/// Whether a node takes part: one that is only suspected does.
#[must_use]
pub fn is_up(node: &NodeLoad) -> bool {
    matches!(node.state, NodeState::Alive | NodeState::Suspect)
}
