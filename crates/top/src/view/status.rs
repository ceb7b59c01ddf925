//! The lines around the bars: title, one node in words, totals, migrations, keys.

use super::{Canvas, format};
use crate::appearance::Tone;
use crate::layout::ScreenLayout;
use crate::model::{Display, Model, is_up};
use tern_control::{NodeFlags, NodeLoad, NodeState, RecentMigration};

/// The keys of the bars and their meanings.
pub const BAR_KEYS: [(&str, &str); 12] = [
    ("h", "help"),
    ("q", "quit"),
    ("Enter", "processes"),
    ("l", "load"),
    ("m", "memory"),
    ("s", "speed"),
    ("d", "dead"),
    ("t", "totals"),
    ("u", "utilisability"),
    ("L", "log load"),
    ("r", "raw memory"),
    ("wvVa", "width"),
];

/// The keys of a list of processes.
pub const LIST_KEYS: [(&str, &str); 7] = [
    ("h", "help"),
    ("q", "back"),
    ("m", "migrate"),
    ("k", "signal"),
    ("P", "by CPU"),
    ("T", "by time"),
    ("N", "by pid"),
];

/// After this many query intervals without a reply, the picture counts as stale.
const STALE_AFTER_QUERIES: u32 = 3;

/// Draws the title: the quantity, the nodes, and the node that reports.
pub(super) fn title(canvas: &mut Canvas<'_>, layout: &ScreenLayout, line: u16) {
    let model = canvas.model;
    let mut column = canvas.write(0, line, "mon", canvas.style(Tone::Heading));
    if let Some(notice) = stale_notice(canvas) {
        canvas.write(column + 2, line, &notice, canvas.style(Tone::Bad));
        return;
    }
    let heading = match model.settings.display {
        Display::Load => "load",
        Display::LogLoad => "load, logarithmic",
        Display::Speed => "speed of a CPU",
        Display::Memory => "memory used and free (+)",
        Display::RawMemory => "memory used with caches, and free (+)",
        Display::Utilisability => "utilisability",
    };
    column = canvas.write(column + 2, line, heading, canvas.style(Tone::Heading));
    let all = model.nodes();
    if all.is_empty() {
        return;
    }
    let up = all.iter().filter(|node| is_up(node)).count();
    let mut text = if up == all.len() {
        format::count(up as u64, "node")
    } else {
        format!("{up} of {} up", format::count(all.len() as u64, "node"))
    };
    let (before, page) = layout.page(model);
    if let (Some(first), Some(last)) = (page.first(), page.last())
        && (before > 0 || page.len() < model.shown().len())
    {
        let dash = model.appearance.choose("–", "-");
        text += &format!(", {}{dash}{}", first.node, last.node);
    }
    column = canvas.write(column + 2, line, &text, canvas.style(Tone::Faint));
    if let Some(me) = model.me() {
        let host = model.node(me).map(|node| node.host.as_str()).unwrap_or_default();
        let reporter = format!("seen from {me} {}", model.appearance.sanitize(host));
        let at = canvas.columns().saturating_sub(reporter.chars().count() as u16);
        if at > column + 1 {
            canvas.write(at, line, reporter.trim_end(), canvas.style(Tone::Faint));
        }
    }
}

/// The notice that the picture is stale, if it is.
pub(super) fn stale_notice(canvas: &Canvas<'_>) -> Option<String> {
    let cluster = &canvas.model.cluster;
    cluster.report.as_ref()?;
    let age = canvas.model.now.saturating_sub(cluster.received_at);
    if let Some(error) = &cluster.error {
        let age = format::ago(age.as_millis() as u64);
        return Some(format!("{} old: {}", age, canvas.model.appearance.sanitize(&error.message)));
    }
    let stale = age > canvas.model.interval * STALE_AFTER_QUERIES + std::time::Duration::from_secs(1);
    stale.then(|| format!("ternd has not answered for {} s", age.as_secs()))
}

/// Draws why there are no bars, in their place.
pub(super) fn draw_empty_reason(canvas: &mut Canvas<'_>, top: u16, lines: u16) {
    let (cluster, appearance) = (&canvas.model.cluster, canvas.model.appearance);
    let (text, hint) = if let Some(error) = &cluster.error {
        (appearance.sanitize(&error.message), error.hint.clone())
    } else if cluster.report.is_some() {
        let hint = "tern init, to found a cluster; tern join, or setpe with a map, to join one";
        ("this node is not in a cluster".into(), Some(hint.into()))
    } else if canvas.model.now.as_secs() >= 2 {
        (format!("ternd has not answered for {} s", canvas.model.now.as_secs()), None)
    } else {
        ("waiting for ternd".into(), None)
    };
    let width = usize::from(canvas.columns()).saturating_sub(4).max(1);
    let hint = hint.map(|hint| format!("try: {}", appearance.sanitize(&hint)));
    let text = wrap(&text, width).into_iter().chain(hint.into_iter().flat_map(|hint| wrap(&hint, width)));
    for (line, text) in text.take(usize::from(lines)).enumerate() {
        let style =
            canvas.style(if line == 0 && cluster.error.is_some() { Tone::Bad } else { Tone::Heading });
        canvas.write(2, top + 1.min(lines.saturating_sub(1)) + line as u16, &text, style);
    }
}

/// Wraps text to lines of at most `width` characters; a longer word has its own line.
pub(super) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.into()),
        }
    }
    lines
}

/// Describes the selected node, or this one if none is selected.
pub(super) fn summary(canvas: &mut Canvas<'_>, line: u16, lines: u16) {
    let model = canvas.model;
    let node = model.selected.or(model.me()).and_then(|node| model.node(node));
    if let Some(node) = node.filter(|_| lines > 0) {
        let text = model.appearance.sanitize(&describe(node, &placed_counts(model, node)));
        canvas.write(0, line, &text, ratatui::style::Style::new());
    }
}

/// How many placed commands of this node run on `node`; if it is this node, also how many wait for
/// capacity.
fn placed_counts(model: &Model, node: &NodeLoad) -> Vec<String> {
    let count = |of| model.placed.get(&of).copied().unwrap_or(0);
    let run = Some(count(Some(node.node))).filter(|count| *count > 0).map(|count| format!("{count} placed"));
    let wait = Some(count(None)).filter(|count| *count > 0 && model.me() == Some(node.node));
    run.into_iter().chain(wait.map(|count| format!("{count} queued"))).collect()
}

fn describe(node: &NodeLoad, placed: &[String]) -> String {
    let name = if node.host.is_empty() {
        format!("node {}", node.node)
    } else {
        format!("node {} {}", node.node, node.host)
    };
    let age = format::ago(node.age_ms);
    match node.state {
        NodeState::NeverSeen => return format!("{name}: no contact yet"),
        NodeState::Dead => return format!("{name}: dead, last seen {age} ago"),
        NodeState::Alive | NodeState::Suspect => {}
    }
    // First what is special about the node; the rest, which every node has, may be cut off.
    let mut parts: Vec<String> = flags(node.flags).map(str::to_owned).collect();
    if node.state == NodeState::Suspect {
        parts.push("suspected".into());
    }
    if node.age_ms >= 1000 {
        parts.push(format!("{age} old"));
    }
    parts.extend_from_slice(placed);
    parts.push(format!("load {}", format::four_columns(f64::from(node.load) / 100.0)));
    let cpus = format!("{:.2}", node.cpus);
    let cpus = cpus.trim_end_matches('0').trim_end_matches('.');
    parts.push(format!("{cpus} CPU{} of speed {}", if cpus == "1" { "" } else { "s" }, node.speed));
    parts.push(format!("{} free", format::bytes_of(node.mem_free, node.mem_total)));
    if node.swap_free < node.swap_total {
        parts.push(format!("swap used {}", format::bytes(node.swap_total - node.swap_free)));
    }
    if node.guests > 0 {
        parts.push(format::count(node.guests.into(), "guest"));
    }
    if node.away > 0 {
        parts.push(format!("{} away", node.away));
    }
    format!("{name}: {}", parts.join(", "))
}

fn flags(flags: NodeFlags) -> impl Iterator<Item = &'static str> {
    let named =
        [(flags.stay, "stay"), (flags.lstay, "lstay"), (flags.block, "block"), (flags.quiet, "quiet")];
    named.into_iter().filter_map(|(set, name)| set.then_some(name))
}

/// Draws the totals of all nodes that are up.
pub(super) fn totals(canvas: &mut Canvas<'_>, line: u16, lines: u16) {
    let up: Vec<&NodeLoad> = canvas.model.nodes().iter().filter(|node| is_up(node)).collect();
    if lines == 0 || up.is_empty() {
        return;
    }
    let sum = |part: fn(&NodeLoad) -> f64| up.iter().map(|node| part(node)).sum::<f64>();
    let bytes =
        |part: fn(&NodeLoad) -> u64| up.iter().fold(0, |all: u64, node| all.saturating_add(part(node)));
    let text = format!(
        "total: load {}, {:.0} CPUs of speed {:.0}, {} free, {}",
        format::four_columns(sum(|node| f64::from(node.load) / 100.0)),
        sum(|node| f64::from(node.cpus)),
        sum(|node| f64::from(node.speed) * f64::from(node.cpus)),
        format::bytes_of(bytes(|node| node.mem_free), bytes(|node| node.mem_total)),
        format::count(up.iter().map(|node| u64::from(node.guests)).sum(), "guest"),
    );
    canvas.write(0, line, &text, canvas.style(Tone::Heading));
}

/// Draws the message, if there is one, and the latest migrations.
pub(super) fn messages(canvas: &mut Canvas<'_>, line: u16, lines: u16) {
    if lines == 0 {
        return;
    }
    let model = canvas.model;
    let mut line = line;
    let end = line + lines;
    if let Some(message) = &model.message {
        let tone = if message.is_error { Tone::Bad } else { Tone::Heading };
        canvas.write(0, line, &model.appearance.sanitize(&message.text), canvas.style(tone));
        line += 1;
    }
    let since = model.now.saturating_sub(model.cluster.received_at).as_millis() as u64;
    let migrations = model.cluster.report.iter().flat_map(|report| &report.migrations);
    for (line, migration) in (line..end).zip(migrations) {
        canvas.write(0, line, &migration_line(canvas, migration, since), canvas.style(Tone::Good));
    }
}

fn migration_line(canvas: &Canvas<'_>, migration: &RecentMigration, since: u64) -> String {
    let report = &migration.report;
    let appearance = canvas.model.appearance;
    let arrow = appearance.choose("→", "->");
    let moved = format!(
        "{} {}: {} {arrow} {}",
        report.pid,
        appearance.sanitize(&report.command),
        report.from,
        report.to
    );
    let ago = format::ago(migration.ago_ms.saturating_add(since));
    let bytes = format::bytes(report.bytes);
    let frozen = format::milliseconds(report.freeze_ms);
    let whole = format!("{moved}, {bytes}, frozen {frozen}, {ago} ago");
    // If the line is too long, the cost of the migration is left out.
    if whole.chars().count() > usize::from(canvas.columns()) { format!("{moved}, {ago} ago") } else { whole }
}

/// Draws the prompt, if there is one; otherwise as many keys as fit.
pub(super) fn keys(canvas: &mut Canvas<'_>, line: u16, keys: &[(&str, &str)]) {
    if let Some(prompt) = &canvas.model.prompt {
        let label = canvas.model.appearance.sanitize(&prompt.text());
        // The end of the typed text must be visible.
        let room = usize::from(canvas.columns()).saturating_sub(2);
        let text: Vec<char> = label.chars().chain(prompt.typed.chars()).collect();
        let text: String = text[text.len().saturating_sub(room)..].iter().collect();
        let column = canvas.write(0, line, &text, canvas.style(Tone::Heading));
        canvas.put(column, line, " ", canvas.style(Tone::Selected));
        return;
    }
    let mut column = 0;
    for (key, meaning) in keys {
        let quits = *key == "q" && canvas.model.list_only;
        let meaning = if quits { "quit" } else { meaning };
        if column + key.len() + 1 + meaning.len() > usize::from(canvas.columns()) {
            return;
        }
        let at = canvas.write(column as u16, line, key, canvas.style(Tone::Heading));
        let at = canvas.write(at + 1, line, meaning, canvas.style(Tone::Faint));
        column = usize::from(at) + 2;
    }
}
