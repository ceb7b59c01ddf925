//! `--report`: a build on one page, which needs nothing but a browser: a row for each command that a node ran at a time, and the
//! tables that the same notes add up to.
//!
//! What programs have said is text everywhere: escaped in the tables, and in the data a string in which no tag can begin.

use super::build::Build;
use super::figures::{Figures, OnNode, seconds};
use super::recipe::Kind;
use super::verdict::{Use, verdict};
use serde_json::{Value, json};
use std::fmt::Write;

/// The page; `@NAME@` is where something of the build goes.
const PAGE: &str = include_str!("report.html");

/// Seconds of a day.
const DAY: f64 = 86_400.0;

/// The page of a build.
pub(super) fn page(build: &Build) -> String {
    let figures = Figures::of(build);
    let title = if build.begin.command.is_empty() { "placed commands" } else { &build.begin.command };
    let tables = [
        nodes(&figures),
        cost(build, &figures),
        held_up(build, &figures),
        whys(&figures),
        commands("The longest commands", build, &figures.longest),
        tail(build, &figures),
    ];
    let mut page = String::with_capacity(PAGE.len() + 256 * build.commands.len());
    let mut parts = PAGE.split('@');
    page.push_str(parts.next().unwrap_or_default());
    // Between two of these signs is a name; another one begins no name that is known, and is itself.
    while let Some(part) = parts.next() {
        match part {
            "TITLE" => page.push_str(&escape(title)),
            "WHEN" => page.push_str(&escape(&when(build))),
            "NUMBERS" => page.push_str(&numbers(&figures)),
            "TABLES" => page.push_str(&tables.concat()),
            "DATA" => page.push_str(&data(build, &figures)),
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

/// What the picture is drawn of. `<` is written as a number: no string ends the script.
fn data(build: &Build, figures: &Figures) -> String {
    let at = |node: u16| figures.nodes.iter().position(|on| on.node.node == node).unwrap_or(0);
    let whys: Vec<&str> = figures.whys.iter().map(|(why, _)| &**why).collect();
    let commands = build.commands.iter().map(|c| {
        let kind = match c.kind {
            Kind::Compile => 0,
            Kind::Link => 1,
            Kind::Other => 2,
        };
        let why = whys.iter().position(|why| **why == c.why);
        json!([c.asked, c.begun, c.ended, at(c.node), c.lane, kind, c.exit, c.cpu, why, c.text])
    });
    let loads = build.loads.iter().map(|load| {
        let of =
            |on: &OnNode| load.busy.iter().find(|(node, _)| *node == on.node.node).map(|(_, busy)| *busy);
        json!([load.at, figures.nodes.iter().map(of).collect::<Vec<_>>()])
    });
    let nodes = figures.nodes.iter().map(|on| json!({ "name": name(on), "lanes": on.most }));
    let data = json!({
        "elapsed": build.elapsed,
        "nodes": nodes.collect::<Value>(),
        "whys": whys,
        "commands": commands.collect::<Value>(),
        "loads": loads.collect::<Value>(),
    });
    data.to_string().replace('<', "\\u003c")
}

/// Text as HTML.
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

fn name(on: &OnNode) -> String {
    let (name, number) = (on.node.name(), on.node.node);
    if number == 0 || name.starts_with("node ") { name } else { format!("{number} {name}") }
}

fn when(build: &Build) -> String {
    let end = match build.exit {
        None => "its end was not noted".into(),
        Some(0) => "it was made".into(),
        Some(exit) => format!("it failed with {exit}"),
    };
    let date = date(build.begin.at / 1_000_000);
    let nodes = build.nodes().len();
    let jobs = build
        .begin
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

/// `2026-11-25 01:22:34` of seconds since 1970, by the calendar that repeats after 400 years.
fn date(time: u64) -> String {
    let (days, second) = (time / 86_400 + 719_468, time % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    // The year begins in March here, so that the leap day is its last.
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (date, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year}-{month:02}-{date:02} {:02}:{:02}:{:02}", second / 3600, second / 60 % 60, second % 60)
}

fn numbers(figures: &Figures) -> String {
    let cells = [
        (format!("{:.1} s", figures.elapsed), "from begin to end"),
        (figures.commands().to_string(), "commands"),
        (format!("{:.1} s", figures.cpu()), "of CPU time"),
        (format!("{:.1}", figures.at_a_time()), "at a time"),
        (format!("{:.0} %", figures.serial() * 100.0), "with one command only"),
        (format!("{:.1} s", figures.waited()), "waited, all together"),
    ];
    let cell = |(number, what): &(String, &str)| format!("<li><b>{number}</b>{what}</li>");
    format!("<ul class=\"numbers\">{}</ul>", cells.iter().map(cell).collect::<String>())
}

/// A table; cells that begin with `>` are numbers. They are HTML already.
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

fn nodes(figures: &Figures) -> String {
    let all = figures.cpu().max(1e-9);
    let row = |on: &OnNode| {
        let share = format!(">{:.0} %", on.cpu / all * 100.0);
        let mut cells = vec![escape(&name(on)), format!(">{}", on.commands), format!(">{}", on.failed)];
        cells.extend([on.cpu, on.ran, on.waited].map(|time| format!(">{time:.1} s")));
        cells.extend([share, format!(">{}", on.most), format!(">{:.1}", on.ran / figures.elapsed.max(1e-6))]);
        cells
    };
    let rows: Vec<_> = figures.nodes.iter().map(row).collect();
    let sum = |of: &dyn Fn(&OnNode) -> f64| figures.nodes.iter().map(of).sum::<f64>();
    let foot = vec![
        "all".into(),
        format!(">{}", figures.commands()),
        format!(">{}", figures.nodes.iter().map(|on| on.failed).sum::<usize>()),
        format!(">{:.1} s", figures.cpu()),
        format!(">{:.1} s", sum(&|on| on.ran)),
        format!(">{:.1} s", figures.waited()),
        ">".into(),
        format!(">{}", figures.most),
        format!(">{:.1}", figures.at_a_time()),
    ];
    let heads = [
        "node",
        ">commands",
        ">failed",
        ">CPU time",
        ">ran",
        ">waited before",
        ">of all CPU time",
        ">most at a time",
        ">at a time, mean",
    ];
    let mut text = format!("<h2>Nodes</h2>{}", table(&heads, &rows, Some(foot)));
    if figures.unknown > 0 {
        let _ =
            write!(text, "<p class=\"faint\">Of {} commands the CPU time is not known.</p>", figures.unknown);
    }
    text
}

/// What a build costs, as the first users of MOSIX counted it: time for each, and how many a day the machines can do.
fn cost(build: &Build, figures: &Figures) -> String {
    let cpu = figures.cpu();
    let each: Vec<_> = figures
        .nodes
        .iter()
        .filter(|on| on.commands > 0)
        .map(|on| format!("{} {:.1} s", escape(&name(on)), on.cpu))
        .collect();
    let cpus: f64 = build.begin.nodes.iter().map(|node| f64::from(node.cpus)).sum();
    let mut text = format!(
        "<h2>What it cost</h2><p>This build took <b>{cpu:.1} CPU seconds</b> ({}) in {:.1} s.",
        each.join(", "),
        figures.elapsed
    );
    if figures.elapsed > 0.0 {
        let _ =
            write!(text, " One after another, {:.0} such builds are done in a day.", DAY / figures.elapsed);
    }
    if cpus > 0.0 && cpu > 0.0 && figures.elapsed > 0.0 {
        let _ = write!(
            text,
            " The {cpus:.0} CPUs of these nodes were {:.0} % used by it; were they always busy with such builds, they did {:.0} in a day.",
            cpu / (cpus * figures.elapsed) * 100.0,
            cpus * DAY / cpu
        );
    }
    text.push_str(" Its price is its CPU seconds times what one costs you.</p><p class=\"faint\">Counted is what the commands used, not make, the files' server, or the network.</p>\n");
    text
}

fn held_up(build: &Build, figures: &Figures) -> String {
    let used = Use::of(build);
    let mut text = format!("<h2>What held it up</h2><p>{}</p>", escape(&verdict(build, figures)));
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
    known.extend(used.server.map(|cpus| format!("its server of files took {cpus:.2} CPUs")));
    if !known.is_empty() {
        let _ = write!(text, "<p class=\"faint\">On the average: {}.</p>", escape(&known.join(", ")));
    }
    let _ = writeln!(
        text,
        "<p class=\"faint\">No command ran for {:.1} s, one alone for {:.1} s; at most {} ran at a time.</p>",
        figures.none, figures.alone, figures.most
    );
    text
}

fn whys(figures: &Figures) -> String {
    let rows: Vec<_> =
        figures.whys.iter().map(|(why, count)| vec![escape(why), format!(">{count}")]).collect();
    format!("<h2>Why they ran where they did</h2>{}", table(&["why", ">commands"], &rows, None))
}

fn commands(heading: &str, build: &Build, which: &[usize]) -> String {
    let node = |number: u16| build.nodes().into_iter().find(|node| node.node == number).unwrap_or_default();
    let row = |at: &usize| {
        let c = build.commands.get(*at)?;
        Some(vec![
            format!(">{:.2} s", seconds(c.ran())),
            format!(">{:.2} s", seconds(c.begun.unwrap_or(0))),
            c.cpu.map_or_else(|| ">?".into(), |cpu| format!(">{:.2} s", seconds(cpu))),
            escape(&node(c.node).name()),
            format!("<code>{}</code>", escape(&c.text)),
        ])
    };
    let rows: Vec<_> = which.iter().filter_map(row).collect();
    format!("<h2>{heading}</h2>{}", table(&[">ran", ">from", ">CPU time", "node", "command"], &rows, None))
}

fn tail(build: &Build, figures: &Figures) -> String {
    if figures.in_tail.is_empty() {
        return String::new();
    }
    let heading =
        format!("The tail: the last {:.1} s, in which less than half as many ran as at most", figures.tail);
    commands(&heading, build, &figures.in_tail)
}

#[cfg(test)]
mod tests {
    use super::super::build::tests::NOTES;
    use super::*;

    #[test]
    fn the_page_has_the_numbers_and_nothing_but_itself() {
        let page = page(&Build::read(NOTES.as_bytes()));
        for part in [
            "<title>mpmake -j4 all</title>",
            "1970-01-01 00:00:01 UTC: it failed with 2; 2 nodes, 4 jobs at a time, 1 recursive make",
            "<li><b>10.0 s</b>from begin to end</li>",
            "<li><b>65 %</b>with one command only</li>",
            "<tr><td>2 away</td><td class=\"n\">2</td><td class=\"n\">0</td><td class=\"n\">6.5 s</td><td class=\"n\">7.5 s</td><td class=\"n\">1.5 s</td><td class=\"n\">65 %</td><td class=\"n\">2</td>",
            "This build took <b>10.0 CPU seconds</b> (1 home 3.5 s, 2 away 6.5 s) in 10.0 s.",
            "8640 such builds are done in a day. The 3 CPUs of these nodes were 33 % used by it",
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
    fn what_a_command_says_is_text() {
        let page = page(&Build::read(NOTES.as_bytes()));
        assert_eq!(page.matches("</script>").count(), 2, "those of the page itself");
        assert!(page.contains("./configure &lt;/script&gt;&lt;b&gt;&amp;"));
        assert!(page.contains(r"./configure \u003c/script>\u003cb>&"));
        let title = NOTES.replace("mpmake -j4 all", "<img onerror='@DATA@'>");
        let page = super::page(&Build::read(title.as_bytes()));
        assert!(
            page.contains("<title>&lt;img onerror=&#39;@DATA@&#39;&gt;</title>") && !page.contains("<img")
        );
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(0), "1970-01-01 00:00:00");
        assert_eq!(date(951_827_696), "2000-02-29 12:34:56");
        assert_eq!(date(1_798_675_200), "2026-12-31 00:00:00");
    }

    #[test]
    fn a_great_build_is_a_page_that_can_be_opened() {
        let mut notes = String::new();
        for n in 0..10_000u32 {
            let id = format!("{n}-0");
            let (asked, begun) = (n * 1000, n * 1000 + 500);
            let _ =
                writeln!(notes, r#"{{"event":"asked","at":{asked},"id":"{id}","command":"gcc -c {n}.c"}}"#);
            let _ =
                writeln!(notes, r#"{{"event":"begun","at":{begun},"id":"{id}","node":{},"why":"x"}}"#, n % 7);
            let ended = begun + 9_000;
            let _ = writeln!(notes, r#"{{"event":"ended","at":{ended},"id":"{id}","exit":0,"cpu":9}}"#);
        }
        let begun = std::time::Instant::now();
        let page = page(&Build::read(notes.as_bytes()));
        assert!(page.len() < 2 << 20, "{} bytes", page.len());
        assert!(begun.elapsed().as_secs() < 5, "{:?}", begun.elapsed());
    }
}
