//! The terminal's abilities: colours and characters.

use ratatui::style::{Color, Modifier, Style};

/// How things look. Nothing is expressed by colour alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Appearance {
    /// Whether colours are used.
    pub colour: bool,
    /// Whether characters beyond ASCII are used.
    pub unicode: bool,
}

/// The meaning of a style.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// A good state.
    Good,
    /// Something that deserves attention.
    Notice,
    /// An error.
    Bad,
    /// The background: scales and frames.
    Faint,
    /// A heading.
    Heading,
    /// The selected item.
    Selected,
    /// This node.
    Own,
}

impl Appearance {
    /// Reads the environment: `NO_COLOR`, `TERM`, and the character set of the locale.
    #[must_use]
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let terminal = set("TERM").unwrap_or_else(|| "dumb".into());
        let locale = set("LC_ALL").or_else(|| set("LC_CTYPE")).or_else(|| set("LANG")).unwrap_or_default();
        let charset = locale.to_ascii_lowercase().replace('-', "");
        Self {
            colour: set("NO_COLOR").is_none() && !is_monochrome(&terminal),
            unicode: charset.contains("utf8"),
        }
    }

    /// The style for a tone.
    #[must_use]
    pub fn style(self, tone: Tone) -> Style {
        let plain = Style::new();
        let coloured = |colour| if self.colour { plain.fg(colour) } else { plain };
        match tone {
            Tone::Good => coloured(Color::Green),
            Tone::Notice => coloured(Color::Yellow),
            Tone::Bad => coloured(Color::Red),
            // Not dark grey, which is the background colour in some palettes.
            Tone::Faint if self.colour => plain.add_modifier(Modifier::DIM),
            Tone::Faint => plain,
            Tone::Heading | Tone::Own => plain.add_modifier(Modifier::BOLD),
            Tone::Selected => plain.add_modifier(Modifier::REVERSED),
        }
    }

    /// Chooses the Unicode or the ASCII form of a sign.
    #[must_use]
    pub fn choose(self, unicode: &'static str, ascii: &'static str) -> &'static str {
        if self.unicode { unicode } else { ascii }
    }

    /// Replaces the characters of a text that the terminal cannot show, or that would control it.
    #[must_use]
    pub fn sanitize(self, text: &str) -> String {
        let shown = |c: char| !c.is_control() && (self.unicode || c.is_ascii());
        text.chars().map(|c| if shown(c) { c } else { '?' }).collect()
    }
}

/// Terminals without colours, by their names in terminfo.
fn is_monochrome(terminal: &str) -> bool {
    const ONE_COLOUR: [&str; 8] =
        ["dumb", "vt52", "vt100", "vt102", "vt200", "vt220", "xterm-mono", "xterm-vt220"];
    ONE_COLOUR.contains(&terminal) || terminal.ends_with("-m") || terminal.ends_with("-mono")
}

/// Whether the terminal cannot move its cursor, so that nothing can be drawn.
#[must_use]
pub fn is_dumb() -> bool {
    std::env::var("TERM").map_or(true, |name| name.is_empty() || name == "dumb")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Appearance {
        Appearance::from_variables(|name| {
            variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).into())
        })
    }

    #[test]
    fn colours_need_terminal_support_and_no_opt_out() {
        assert!(of(&[("TERM", "xterm-256color")]).colour);
        assert!(of(&[("TERM", "xterm"), ("NO_COLOR", "")]).colour);
        assert!(!of(&[("TERM", "xterm"), ("NO_COLOR", "1")]).colour);
        for terminal in ["dumb", "vt220", "linux-m", ""] {
            assert!(!of(&[("TERM", terminal)]).colour, "{terminal}");
        }
    }

    #[test]
    fn first_locale_variable_that_is_set_wins() {
        assert!(of(&[("LANG", "de_AT.UTF-8")]).unicode);
        assert!(of(&[("LC_ALL", ""), ("LC_CTYPE", "C.utf8")]).unicode);
        assert!(!of(&[("LC_ALL", "C"), ("LANG", "en_GB.UTF-8")]).unicode);
        assert!(!of(&[]).unicode);
    }

    #[test]
    fn control_characters_are_replaced() {
        let ascii = Appearance { colour: true, unicode: false };
        assert_eq!(ascii.sanitize("é\x1b[2J\u{9b}1m"), "??[2J?1m");
        assert_eq!(Appearance { unicode: true, ..ascii }.sanitize("é\u{9b}"), "é?");
    }
}
