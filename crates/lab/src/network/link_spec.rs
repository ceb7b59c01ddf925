//! The links between nodes: `switch|hub|p2p[:RATE[,DELAY[,LOSS]]]`, as in `switch:1gbit,0.2ms,1%`.

use crate::error::LabError;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The shape of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Topology {
    /// A cable from each node to a switch; each has its own rate in each direction.
    #[default]
    Switch,
    /// One medium shared by all nodes, with one rate for all of them together.
    Hub,
    /// A cable between each pair of nodes, each with its own rate.
    P2p,
}

/// The links between the nodes of a lab.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct LinkSpec {
    /// The shape of the network.
    #[serde(rename = "shape")]
    pub topology: Topology,
    /// Bits per second, 1 kbit to 100 Gbit; `None`: as fast as the machine.
    pub rate: Option<u64>,
    /// One-way delay from node to node; a round trip takes twice as long. At most 10 s.
    pub delay: Duration,
    /// The share of frames that are lost, 0 to 1.
    pub loss: f64,
}

impl LinkSpec {
    /// Whether the link needs more than the kernel's bridge and TBF.
    pub(crate) fn needs_emulator(&self) -> bool {
        self.topology == Topology::Hub || !self.delay.is_zero() || self.loss > 0.0
    }

    pub(crate) fn max_nodes(&self) -> u16 {
        // Each pair of nodes has a cable and a bridge: 120 of them for 16 nodes.
        if self.topology == Topology::P2p { 16 } else { u16::MAX }
    }
}

impl fmt::Display for LinkSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.topology {
            Topology::Switch => "switch",
            Topology::Hub => "hub",
            Topology::P2p => "p2p",
        })?;
        let mut separator = ":";
        if let Some(rate) = self.rate {
            write!(f, ":{rate}bit")?;
            separator = ",";
        }
        if !self.delay.is_zero() {
            write!(f, "{separator}{}us", self.delay.as_micros())?;
            separator = ",";
        }
        if self.loss > 0.0 {
            write!(f, "{separator}{}%", self.loss * 100.0)?;
        }
        Ok(())
    }
}

impl FromStr for LinkSpec {
    type Err = LabError;

    fn from_str(text: &str) -> Result<Self, LabError> {
        let bad = |why: String| {
            LabError::BadOption(format!(
                "{why}; a link is switch, hub or p2p, then :RATE,DELAY,LOSS as in switch:1gbit,0.2ms,1%"
            ))
        };
        let (topology, rest) = text.split_once(':').unwrap_or((text, ""));
        let topology = match topology {
            "switch" => Topology::Switch,
            "hub" => Topology::Hub,
            "p2p" => Topology::P2p,
            other => return Err(bad(format!("unknown link {other:?}"))),
        };
        let mut link = Self { topology, ..Self::default() };
        // Each part is identified by its unit, so that any of them may be omitted.
        for part in rest.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let unit_at = part.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(part.len());
            let (number, unit) = part.split_at(unit_at);
            let number: f64 = number.parse().map_err(|_e| bad(format!("{part:?} has no number")))?;
            let bits = |times: f64| Some((number * times) as u64);
            let time = |seconds: f64| Duration::try_from_secs_f64(number * seconds).unwrap_or(Duration::MAX);
            match unit.to_ascii_lowercase().as_str() {
                "bit" => link.rate = bits(1.0),
                "kbit" => link.rate = bits(1e3),
                "mbit" => link.rate = bits(1e6),
                "gbit" => link.rate = bits(1e9),
                "us" => link.delay = time(1e-6),
                "ms" => link.delay = time(1e-3),
                "s" => link.delay = time(1.0),
                "%" => link.loss = number / 100.0,
                _ => return Err(bad(format!("{part:?} has an unknown unit"))),
            }
        }
        if link.rate.is_some_and(|r| !(1_000..=100_000_000_000).contains(&r)) {
            return Err(bad("a rate is 1kbit to 100gbit".to_owned()));
        }
        if link.delay > Duration::from_secs(10) || link.loss > 1.0 {
            return Err(bad("a delay is at most 10s, a loss at most 100%".to_owned()));
        }
        Ok(link)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(text: &str) -> LinkSpec {
        text.parse().unwrap()
    }

    #[test]
    fn link_specs_are_parsed() {
        let full = link("switch:1gbit,0.2ms,1%");
        assert_eq!(
            (full.topology, full.rate, full.delay),
            (Topology::Switch, Some(1_000_000_000), Duration::from_micros(200))
        );
        assert!((full.loss - 0.01).abs() < 1e-9);
        assert_eq!(link("hub:10mbit").rate, Some(10_000_000));
        assert_eq!(link("p2p:,5ms").delay, Duration::from_millis(5));
        assert_eq!(link("switch"), LinkSpec::default());
        for bad in
            ["", "ring", "switch:fast", "switch:5", "hub:1bit", "switch:11s", "p2p:101%", "switch:-1ms"]
        {
            assert!(bad.parse::<LinkSpec>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn link_specs_survive_formatting() {
        for text in ["switch", "hub:10mbit", "p2p:100mbit,0.2ms", "switch:1gbit,3ms,2%", "switch:1ms"] {
            assert_eq!(link(&link(text).to_string()), link(text), "{text}");
        }
    }
}
