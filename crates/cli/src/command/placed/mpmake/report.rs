//! `--report`: a build as one HTML page that needs nothing but a browser. It has a chart, in which
//! a node has as many rows as it ran commands at a time, and tables of statistics.
//!
//! Text from programs is escaped everywhere: in the tables as HTML; in the data, `<` is encoded so
//! that no tag can begin.

use super::bottleneck::{Utilisation, bottleneck};
use super::build::Build;
use super::recipe::Kind;
use super::statistics::{NodeStatistics, Statistics, seconds};
use serde_json::{Value, json};
use std::fmt::Write;

/// The page template; `@NAME@` marks where parts are inserted.
const PAGE: &str = include_str!("report.html");

/// The seconds of a day.
const DAY_SECONDS: f64 = 86_400.0;

/// The HTML page of a build.
pub(super) fn page(build: &Build) -> String {
    let statistics = Statistics::new(build);
    let title = if build.start.command.is_empty() { "placed commands" } else { &build.start.command };
    let tables = [
        nodes_section(&statistics),
        cost_section(build, &statistics),
        bottleneck_section(build, &statistics),
        reasons_section(&statistics),
        commands_section("The longest commands", build, &statistics.longest),
        tail_section(build, &statistics),
    ];
    let mut page = String::with_capacity(PAGE.len() + 256 * build.commands.len());
    let mut parts = PAGE.split('@');
    page.push_str(parts.next().unwrap_or_default());
    // A known name between two `@` is replaced; any other `@` is copied.
    while let Some(part) = parts.next() {
        match part {
            "TITLE" => page.push_str(&escape(title)),
            "WHEN" => page.push_str(&escape(&subtitle(build))),
            "NUMBERS" => page.push_str(&key_figures(&statistics)),
            "TABLES" => page.push_str(&tables.concat()),
            "DATA" => page.push_str(&chart_data(build, &statistics)),
            other => {
                page.push('@');
                page.push_str(other);
                continue;
            }
        }
        page.push_str(parts.next().unwrap_or_default());
    }
    page
}

/// The data of the chart as JSON. `<` is written as an escape, so no string can end the script
/// element.
fn chart_data(build: &Build, statistics: &Statistics) -> String {
    let at = |node: u16| statistics.nodes.iter().position(|on| on.node.node == node).unwrap_or(0);
    let whys: Vec<&str> = statistics.reasons.iter().map(|(why, _)| &**why).collect();
    let commands = build.commands.iter().map(|c| {
        let kind = match c.kind {
            Kind::Compile => 0,
            Kind::Link => 1,
            Kind::Other => 2,
        };
        let why = whys.iter().position(|why| **why == c.why);
        json!([
            c.requested_at,
            c.started_at,
            c.ended_at,
            at(c.node),
            c.lane,
            kind,
            c.exit,
            c.cpu,
            why,
            c.text
        ])
    });
    let loads = build.loads.iter().map(|load| {
        let of = |on: &NodeStatistics| {
            load.busy.iter().find(|(node, _)| *node == on.node.node).map(|(_, busy)| *busy)
        };
        json!([load.at, statistics.nodes.iter().map(of).collect::<Vec<_>>()])
    });
    let nodes =
        statistics.nodes.iter().map(|on| json!({ "name": display_name(on), "lanes": on.max_running }));
    let data = json!({
        "elapsed": build.elapsed,
        "nodes": nodes.collect::<Value>(),
        "whys": whys,
        "commands": commands.collect::<Value>(),
        "loads": loads.collect::<Value>(),
    });
    data.to_string().replace('<', "\\u003c")
}

/// Escapes text for HTML.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    escaped
}

fn display_name(on: &NodeStatistics) -> String {
    let (name, number) = (on.node.name(), on.node.node);
    if number == 0 || name.starts_with("node ") { name } else { format!("{number} {name}") }
}

fn subtitle(build: &Build) -> String {
    let end = match build.exit {
        None => "its end was not recorded".into(),
        Some(0) => "it succeeded".into(),
        Some(exit) => format!("it failed with {exit}"),
    };
    let date = date(build.start.at / 1_000_000);
    let nodes = build.nodes().len();
    let jobs = build
        .start
        .jobs
        .filter(|jobs| *jobs > 0)
        .map(|jobs| format!(", {jobs} jobs at a time"))
        .unwrap_or_default();
    let makes = match build.makes {
        0 => String::new(),
        1 => ", 1 recursive make".into(),
        more => format!(", {more} recursive makes"),
    };
    format!("{date} UTC: {end}; {nodes} nodes{jobs}{makes}")
}

/// Formats seconds since 1970 as `2026-11-25 01:22:34`, with the 400-year cycle of the calendar.
fn date(time: u64) -> String {
    let (days, second) = (time / 86_400 + 719_468, time % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    // The computed year starts in March, so that the leap day is its last day.
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (date, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year}-{month:02}-{date:02} {:02}:{:02}:{:02}", second / 3600, second / 60 % 60, second % 60)
}

fn key_figures(statistics: &Statistics) -> String {
    let cells = [
        (format!("{:.1} s", statistics.elapsed), "from start to end"),
        (statistics.commands().to_string(), "commands"),
        (format!("{:.1} s", statistics.cpu()), "of CPU time"),
        (format!("{:.1}", statistics.mean_running()), "commands at a time"),
        (format!("{:.0} %", statistics.single_share() * 100.0), "with a single command"),
        (format!("{:.1} s", statistics.wait_time()), "of waiting, in total"),
    ];
    let cell = |(number, what): &(String, &str)| format!("<li><b>{number}</b>{what}</li>");
    format!("<ul class=\"numbers\">{}</ul>", cells.iter().map(cell).collect::<String>())
}

/// An HTML table; a cell that begins with `>` is right-aligned. Cells are HTML already.
fn table(heads: &[&str], rows: &[Vec<String>], foot: Option<Vec<String>>) -> String {
    let cell = |tag: &str, text: &str| match text.strip_prefix('>') {
        Some(number) => format!("<{tag} class=\"n\">{number}</{tag}>"),
        None => format!("<{tag}>{text}</{tag}>"),
    };
    let row = |cells: &[String]| {
        format!("<tr>{}</tr>", cells.iter().map(|text| cell("td", text)).collect::<String>())
    };
    let head: String = heads.iter().map(|text| cell("th", text)).collect();
    let body: String = rows.iter().map(|cells| row(cells)).collect();
    let foot = foot.map(|cells| format!("<tfoot>{}</tfoot>", row(&cells))).unwrap_or_default();
    format!(
        "<div class=\"wide\"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody>{foot}</table></div>\n"
    )
}

fn nodes_section(statistics: &Statistics) -> String {
    let all = statistics.cpu().max(1e-9);
    let row = |on: &NodeStatistics| {
        let share = format!(">{:.0} %", on.cpu / all * 100.0);
        let mut cells =
            vec![escape(&display_name(on)), format!(">{}", on.commands), format!(">{}", on.failed)];
        cells.extend([on.cpu, on.run_time, on.wait_time].map(|time| format!(">{time:.1} s")));
        cells.extend([
            share,
            format!(">{}", on.max_running),
            format!(">{:.1}", on.run_time / statistics.elapsed.max(1e-6)),
        ]);
        cells
    };
    let rows: Vec<_> = statistics.nodes.iter().map(row).collect();
    let sum = |of: &dyn Fn(&NodeStatistics) -> f64| statistics.nodes.iter().map(of).sum::<f64>();
    let foot = vec![
        "all".into(),
        format!(">{}", statistics.commands()),
        format!(">{}", statistics.nodes.iter().map(|on| on.failed).sum::<usize>()),
        format!(">{:.1} s", statistics.cpu()),
        format!(">{:.1} s", sum(&|on| on.run_time)),
        format!(">{:.1} s", statistics.wait_time()),
        ">".into(),
        format!(">{}", statistics.max_running),
        format!(">{:.1}", statistics.mean_running()),
    ];
    let heads = [
        "node",
        ">commands",
        ">failed",
        ">CPU time",
        ">ran",
        ">waited",
        ">share of CPU time",
        ">maximum at a time",
        ">mean at a time",
    ];
    let mut text = format!("<h2>Nodes</h2>{}", table(&heads, &rows, Some(foot)));
    if statistics.unknown_cpu > 0 {
        let _ = write!(
            text,
            "<p class=\"faint\">The CPU time of {} commands is unknown.</p>",
            statistics.unknown_cpu
        );
    }
    text
}

/// The cost of a build: CPU time per node, and builds per day.
fn cost_section(build: &Build, statistics: &Statistics) -> String {
    let cpu = statistics.cpu();
    let each: Vec<_> = statistics
        .nodes
        .iter()
        .filter(|on| on.commands > 0)
        .map(|on| format!("{} {:.1} s", escape(&display_name(on)), on.cpu))
        .collect();
    let cpus: f64 = build.start.nodes.iter().map(|node| f64::from(node.cpus)).sum();
    let mut text = format!(
        "<h2>What it cost</h2><p>This build took <b>{cpu:.1} CPU seconds</b> ({}) in {:.1} s.",
        each.join(", "),
        statistics.elapsed
    );
    if statistics.elapsed > 0.0 {
        let _ = write!(
            text,
            " Run one after another, {:.0} such builds complete in a day.",
            DAY_SECONDS / statistics.elapsed
        );
    }
    if cpus > 0.0 && cpu > 0.0 && statistics.elapsed > 0.0 {
        let _ = write!(
            text,
            " It used {:.0} % of the {cpus:.0} CPUs of these nodes; always busy with such builds, they would complete {:.0} in a day.",
            cpu / (cpus * statistics.elapsed) * 100.0,
            cpus * DAY_SECONDS / cpu
        );
    }
    text.push_str(" Its price is its CPU seconds times your price of one.</p><p class=\"faint\">This counts the commands, but not make, the file server, or the network.</p>\n");
    text
}

fn bottleneck_section(build: &Build, statistics: &Statistics) -> String {
    let used = Utilisation::new(build);
    let mut text = format!("<h2>Bottleneck</h2><p>{}</p>", escape(&bottleneck(build, statistics)));
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    let mut known = Vec::new();
    known.extend(used.home.map(|share| format!("this node's CPUs {} in use", percent(share))));
    known.extend(used.others.map(|share| format!("the others' {}", percent(share))));
    known.extend(used.net.map(|(received, sent)| {
        format!("{:.1} MB/s received and {:.1} MB/s sent here", received / 1e6, sent / 1e6)
    }));
    known.extend(used.link.map(|share| format!("that is {} of its fastest link", percent(share))));
    known.extend(
        used.waited.map(|share| format!("for {} of the time data waited to be sent", percent(share))),
    );
    known.extend(used.server.map(|cpus| format!("its file server used {cpus:.2} CPUs")));
    if !known.is_empty() {
        let _ = write!(text, "<p class=\"faint\">On average: {}.</p>", escape(&known.join(", ")));
    }
    let _ = writeln!(
        text,
        "<p class=\"faint\">No command ran for {:.1} s, one alone for {:.1} s; at most {} ran at a time.</p>",
        statistics.idle, statistics.single, statistics.max_running
    );
    text
}

fn reasons_section(statistics: &Statistics) -> String {
    let rows: Vec<_> =
        statistics.reasons.iter().map(|(why, count)| vec![escape(why), format!(">{count}")]).collect();
    format!("<h2>Reasons for the placement</h2>{}", table(&["reason", ">commands"], &rows, None))
}

fn commands_section(heading: &str, build: &Build, which: &[usize]) -> String {
    let node = |number: u16| build.nodes().into_iter().find(|node| node.node == number).unwrap_or_default();
    let row = |at: &usize| {
        let c = build.commands.get(*at)?;
        Some(vec![
            format!(">{:.2} s", seconds(c.run_time())),
            format!(">{:.2} s", seconds(c.started_at.unwrap_or(0))),
            c.cpu.map_or_else(|| ">?".into(), |cpu| format!(">{:.2} s", seconds(cpu))),
            escape(&node(c.node).name()),
            format!("<code>{}</code>", escape(&c.text)),
        ])
    };
    let rows: Vec<_> = which.iter().filter_map(row).collect();
    format!(
        "<h2>{heading}</h2>{}",
        table(&[">run time", ">start", ">CPU time", "node", "command"], &rows, None)
    )
}

fn tail_section(build: &Build, statistics: &Statistics) -> String {
    if statistics.in_tail.is_empty() {
        return String::new();
    }
    let heading =
        format!("The tail: the last {:.1} s, in which fewer than half of the maximum ran", statistics.tail);
    commands_section(&heading, build, &statistics.in_tail)
}

#[cfg(test)]
mod tests {
    use super::super::build::tests::EVENTS;
    use super::*;

    #[test]
    fn page_has_the_figures_and_no_external_resources() {
        let page = page(&Build::read(EVENTS.as_bytes()));
        for part in [
            "<title>mpmake -j4 all</title>",
            "1970-01-01 00:00:01 UTC: it failed with 2; 2 nodes, 4 jobs at a time, 1 recursive make",
            "<li><b>10.0 s</b>from start to end</li>",
            "<li><b>65 %</b>with a single command</li>",
            "<tr><td>2 away</td><td class=\"n\">2</td><td class=\"n\">0</td><td class=\"n\">6.5 s</td><td class=\"n\">7.5 s</td><td class=\"n\">1.5 s</td><td class=\"n\">65 %</td><td class=\"n\">2</td>",
            "This build took <b>10.0 CPU seconds</b> (1 home 3.5 s, 2 away 6.5 s) in 10.0 s.",
            "8640 such builds complete in a day. It used 33 % of the 3 CPUs of these nodes",
            "The build itself: for 65 % of the time only one command ran.",
            r#"[2000000,2500000,6000000,1,0,0,0,3000000,"#,
        ] {
            assert!(page.contains(part), "{part} is not in\n{page}");
        }
        let from_elsewhere = ["http://", "https://", "src=", "url(", "@import", "@TITLE@", "@DATA@"];
        assert!(from_elsewhere.iter().all(|part| !page.contains(part)));
        assert!(page.contains("@media (prefers-color-scheme: dark)"), "what is no name stays");
    }

    #[test]
    fn text_of_commands_is_escaped() {
        let page = page(&Build::read(EVENTS.as_bytes()));
        assert_eq!(page.matches("</script>").count(), 2, "those of the page itself");
        assert!(page.contains("./configure &lt;/script&gt;&lt;b&gt;&amp;"));
        assert!(page.contains(r"./configure \u003c/script>\u003cb>&"));
        let title = EVENTS.replace("mpmake -j4 all", "<img onerror='@DATA@'>");
        let page = super::page(&Build::read(title.as_bytes()));
        assert!(
            page.contains("<title>&lt;img onerror=&#39;@DATA@&#39;&gt;</title>") && !page.contains("<img")
        );
    }

    #[test]
    fn dates_are_correct() {
        assert_eq!(date(0), "1970-01-01 00:00:00");
        assert_eq!(date(951_827_696), "2000-02-29 12:34:56");
        assert_eq!(date(1_798_675_200), "2026-12-31 00:00:00");
    }

    #[test]
    fn large_build_has_a_page_of_moderate_size() {
        let mut log = String::new();
        for n in 0..10_000u32 {
            let id = format!("{n}-0");
            let (asked, begun) = (n * 1000, n * 1000 + 500);
            let _ = writeln!(log, r#"{{"event":"asked","at":{asked},"id":"{id}","command":"gcc -c {n}.c"}}"#);
            let _ =
                writeln!(log, r#"{{"event":"begun","at":{begun},"id":"{id}","node":{},"why":"x"}}"#, n % 7);
            let ended = begun + 9_000;
            let _ = writeln!(log, r#"{{"event":"ended","at":{ended},"id":"{id}","exit":0,"cpu":9}}"#);
        }
        let started = std::time::Instant::now();
        let page = page(&Build::read(log.as_bytes()));
        assert!(page.len() < 2 << 20, "{} bytes", page.len());
        assert!(started.elapsed().as_secs() < 5, "{:?}", started.elapsed());
    }
}
