//! What the terminal can show: colours or none, and which signs.

use ratatui::style::{Color, Modifier, Style};

/// How things look. Nothing is told by colour alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Appearance {
    /// Whether colours are used.
    pub colour: bool,
    /// Whether signs beyond ASCII are used.
    pub unicode: bool,
}

/// What a colour says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// All is well.
    Good,
    /// Look here.
    Notice,
    /// Something is wrong.
    Bad,
    /// Scales, frames and what else is in the background.
    Faint,
    /// A heading.
    Heading,
    /// What has been chosen.
    Chosen,
    /// This node.
    Own,
}

impl Appearance {
    /// As the environment says: `NO_COLOR`, `TERM`, and the character set of the locale.
    #[must_use]
    pub fn of_environment() -> Self {
        Self::of(|name| std::env::var(name).ok())
    }

    fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let terminal = set("TERM").unwrap_or_else(|| "dumb".into());
        let locale = set("LC_ALL").or_else(|| set("LC_CTYPE")).or_else(|| set("LANG")).unwrap_or_default();
        let charset = locale.to_ascii_lowercase().replace('-', "");
        Self {
            colour: set("NO_COLOR").is_none() && !is_monochrome(&terminal),
            unicode: charset.contains("utf8"),
        }
    }

    /// The style of a tone.
    #[must_use]
    pub fn style(self, tone: Tone) -> Style {
        let plain = Style::new();
        let coloured = |colour| if self.colour { plain.fg(colour) } else { plain };
        match tone {
            Tone::Good => coloured(Color::Green),
            Tone::Notice => coloured(Color::Yellow),
            Tone::Bad => coloured(Color::Red),
            // Not dark grey, which is the background in some palettes.
            Tone::Faint if self.colour => plain.add_modifier(Modifier::DIM),
            Tone::Faint => plain,
            Tone::Heading | Tone::Own => plain.add_modifier(Modifier::BOLD),
            Tone::Chosen => plain.add_modifier(Modifier::REVERSED),
        }
    }

    /// The one sign or the other.
    #[must_use]
    pub fn sign(self, unicode: &'static str, ascii: &'static str) -> &'static str {
        if self.unicode { unicode } else { ascii }
    }

    /// Text of programs and other nodes, with nothing in it that this terminal cannot show or would obey.
    #[must_use]
    pub fn text(self, text: &str) -> String {
        let shown = |c: char| !c.is_control() && (self.unicode || c.is_ascii());
        text.chars().map(|c| if shown(c) { c } else { '?' }).collect()
    }
}

/// Terminals of one colour, by the names that terminfo gives them.
fn is_monochrome(terminal: &str) -> bool {
    const ONE_COLOUR: [&str; 8] =
        ["dumb", "vt52", "vt100", "vt102", "vt200", "vt220", "xterm-mono", "xterm-vt220"];
    ONE_COLOUR.contains(&terminal) || terminal.ends_with("-m") || terminal.ends_with("-mono")
}

/// Whether the terminal cannot move its cursor, so that nothing can be drawn on it.
#[must_use]
pub fn is_dumb() -> bool {
    std::env::var("TERM").map_or(true, |name| name.is_empty() || name == "dumb")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Appearance {
        Appearance::of(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).into()))
    }

    #[test]
    fn colours_need_a_terminal_that_has_them_and_a_user_who_wants_them() {
        assert!(of(&[("TERM", "xterm-256color")]).colour);
        assert!(of(&[("TERM", "xterm"), ("NO_COLOR", "")]).colour);
        assert!(!of(&[("TERM", "xterm"), ("NO_COLOR", "1")]).colour);
        for terminal in ["dumb", "vt220", "linux-m", ""] {
            assert!(!of(&[("TERM", terminal)]).colour, "{terminal}");
        }
    }

    #[test]
    fn the_first_variable_that_is_set_names_the_locale() {
        assert!(of(&[("LANG", "de_AT.UTF-8")]).unicode);
        assert!(of(&[("LC_ALL", ""), ("LC_CTYPE", "C.utf8")]).unicode);
        assert!(!of(&[("LC_ALL", "C"), ("LANG", "en_GB.UTF-8")]).unicode);
        assert!(!of(&[]).unicode);
    }

    #[test]
    fn nothing_commands_the_terminal() {
        let ascii = Appearance { colour: true, unicode: false };
        assert_eq!(ascii.text("é\x1b[2J\u{9b}1m"), "??[2J?1m");
        assert_eq!(Appearance { unicode: true, ..ascii }.text("é\u{9b}"), "é?");
    }
}
