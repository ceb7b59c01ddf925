//! The state of the program: what is shown, not how.

pub mod list;
pub mod prompt;

use crate::appearance::Appearance;
use crate::request::TopError;
use crate::users::UserNames;
use list::ProcessList;
use prompt::Prompt;
use std::collections::BTreeMap;
use std::time::Duration;
use tern_control::{ClusterReport, NodeLoad, NodeState};
use tern_ids::NodeId;

/// The quantity that the bars show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Display {
    /// Load: 1 is one standard CPU kept busy.
    #[default]
    Load,
    /// Load on a logarithmic scale.
    LogLoad,
    /// The speed of one CPU; 10,000 is the standard.
    Speed,
    /// Memory used, and memory available to a new process.
    Memory,
    /// Memory used, with caches counted as used, and unused memory.
    RawMemory,
    /// The percentage of the time not spent waiting for paging.
    Utilisability,
}

/// The width of a node's column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ColumnWidth {
    /// The widest of the other widths in which all nodes fit; otherwise the narrowest.
    #[default]
    Auto,
    /// Numbers are horizontal, and the value is above the bar.
    Wide,
    /// Numbers are vertical.
    Vertical,
    /// Numbers are vertical, and there is no space between bars.
    Tight,
}

/// The settings from the command line, which keys change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ViewSettings {
    /// The quantity that the bars show.
    pub display: Display,
    /// The width of a node's column.
    pub width: ColumnWidth,
    /// Whether to show also dead nodes and nodes that have never been in contact.
    pub dead: bool,
    /// Whether to show the cluster's totals.
    pub totals: bool,
    /// The first node shown; if it does not exist, the next one.
    pub first: Option<NodeId>,
}

/// The last report about the cluster, and the state of the query.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ClusterState {
    /// The last report.
    pub report: Option<ClusterReport>,
    /// When it arrived.
    pub received_at: Duration,
    /// The error of the last query, if it failed.
    pub error: Option<TopError>,
    /// When the pending query was sent, if there is one.
    pub pending_since: Option<Duration>,
    /// When the last query was sent.
    pub last_sent: Option<Duration>,
}

/// The content of the message line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusMessage {
    /// The text.
    pub text: String,
    /// Whether it reports an error.
    pub is_error: bool,
}

/// The selectable query intervals, the shortest first.
pub const INTERVALS: [Duration; 5] = [
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
];

/// The state of the program.
#[derive(Debug, Clone)]
pub struct Model {
    /// The terminal's abilities.
    pub appearance: Appearance,
    /// The screen's columns and rows.
    pub size: (u16, u16),
    /// The time since the start.
    pub now: Duration,
    /// The settings of the view.
    pub settings: ViewSettings,
    /// The query interval.
    pub interval: Duration,
    /// The cluster.
    pub cluster: ClusterState,
    /// The placed commands of this node: how many run on each node, and how many wait (key `None`).
    pub placed: BTreeMap<Option<NodeId>, u32>,
    /// The selected node.
    pub selected: Option<NodeId>,
    /// The list of processes, if it is shown.
    pub list: Option<ProcessList>,
    /// Whether there is only the list (`mtop`), so that leaving it quits.
    pub list_only: bool,
    /// The first line of the help on the screen, if the help is shown.
    pub help: Option<usize>,
    /// The prompt, if the user is typing.
    pub prompt: Option<Prompt>,
    /// The message, if there is one.
    pub message: Option<StatusMessage>,
    /// The names of users.
    pub users: UserNames,
    /// Whether keys can be pressed; false for a printed picture.
    pub is_interactive: bool,
}

impl Model {
    /// A model before the first report.
    #[must_use]
    pub fn new(appearance: Appearance, settings: ViewSettings, users: UserNames) -> Self {
        Self {
            appearance,
            size: (80, 24),
            now: Duration::ZERO,
            settings,
            interval: INTERVALS[1],
            cluster: ClusterState::default(),
            placed: BTreeMap::new(),
            selected: None,
            list: None,
            list_only: false,
            help: None,
            prompt: None,
            message: None,
            users,
            is_interactive: true,
        }
    }

    /// All nodes of the cluster.
    #[must_use]
    pub fn nodes(&self) -> &[NodeLoad] {
        self.cluster.report.as_ref().map_or(&[], |report| &report.nodes)
    }

    /// The nodes that have a column.
    #[must_use]
    pub fn shown(&self) -> Vec<&NodeLoad> {
        self.nodes().iter().filter(|node| self.settings.dead || is_up(node)).collect()
    }

    /// This node, once its daemon has replied.
    #[must_use]
    pub fn me(&self) -> Option<NodeId> {
        self.cluster.report.as_ref().map(|report| report.me)
    }

    /// The report about a node.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&NodeLoad> {
        self.nodes().iter().find(|node| node.node == id)
    }

    /// Shows a message.
    pub fn show_message(&mut self, text: impl Into<String>) {
        self.message = Some(StatusMessage { text: text.into(), is_error: false });
    }

    /// Shows an error.
    pub fn show_error(&mut self, error: &TopError) {
        let hint = error.hint.as_ref().map(|hint| format!("; try: {hint}")).unwrap_or_default();
        self.message = Some(StatusMessage { text: format!("{}{hint}", error.message), is_error: true });
    }
}

/// Whether a node takes part in the cluster; a suspected one does.
#[must_use]
pub fn is_up(node: &NodeLoad) -> bool {
    matches!(node.state, NodeState::Alive | NodeState::Suspect)
}
