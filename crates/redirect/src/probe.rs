//! Which of this crate's means the kernel and the user's rights permit.

use crate::error::Result;
use crate::filter::Filter;
use crate::injector::Injector;
use crate::link::{Links, NetworkInterface, VethPair};
use crate::network_namespace::NetworkNamespace;
use crate::packet_socket;
use crate::table::Table;
use crate::tunnel;

/// Bit of CAP_NET_ADMIN in the masks of `/proc/PID/status` (`linux/capability.h`).
const CAP_NET_ADMIN: u32 = 12;

/// Name of the table and of an interface in the probe's own namespace.
const TABLE: &str = "tern-probe";
const LINK: &str = "tern-probe";
const TAP: &str = "tern-probe-tap";

/// One property of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The property, for a list.
    pub name: &'static str,
    /// Whether the machine has it.
    pub possible: bool,
    /// Whether connections can be redirected without it.
    pub optional: bool,
    /// One sentence: the use of the property, or the reason why it is missing and a remedy.
    pub explanation: String,
}

impl Finding {
    fn new(name: &'static str, use_: &str, tried: std::result::Result<(), String>) -> Self {
        let possible = tried.is_ok();
        let explanation = tried.err().unwrap_or_else(|| use_.to_owned());
        Self { name, possible, optional: false, explanation }
    }
}

/// Tries each means in a network namespace of its own, which ends with the call. If a finding that is
/// not optional is missing, connections must be relayed through home.
#[must_use]
pub fn probe() -> Vec<Finding> {
    let mut findings = vec![Finding::new(
        "CAP_NET_ADMIN",
        "this process may configure its network namespace",
        if has_capability(CAP_NET_ADMIN) {
            Ok(())
        } else {
            Err("this process has no CAP_NET_ADMIN; start tern-net as root".to_owned())
        },
    )];
    let namespace = NetworkNamespace::create();
    let inside = namespace
        .as_ref()
        .map_err(ToString::to_string)
        .and_then(|namespace| namespace.run(probe_inside).map_err(|error| error.to_string()));
    let created = namespace.map(|_| ()).map_err(|error| error.to_string());
    findings.push(Finding::new("network namespaces", "each home has a namespace on a guest's node", created));
    match inside {
        Ok(more) => findings.extend(more),
        Err(reason) => {
            let untried = || Err(format!("not tried without a network namespace: {reason}"));
            findings.extend(NAMES.map(|name| Finding::new(name, "", untried())));
        }
    }
    findings
}

/// The properties that are tried inside the namespace, in this order.
const NAMES: [&str; 6] = [
    "veth",
    "nftables netdev",
    "nftables ingress and fwd",
    "packet sockets",
    "protected table",
    "TAP devices",
];

fn probe_inside() -> Vec<Finding> {
    let [veth, netdev, ingress, packet, protected, tap] = NAMES;
    let link = make_link();
    let mut findings = vec![Finding::new(
        veth,
        "packets enter and leave a home's namespace through a veth pair",
        link.as_ref().map(|_| ()).map_err(ToString::to_string),
    )];
    let mut table = Table::open(TABLE);
    findings.push(Finding::new(
        netdev,
        "connections are elements of an nftables table",
        table.as_ref().map(|_| ()).map_err(ToString::to_string),
    ));
    let forwards = match &mut table {
        Ok(table) => {
            Injector::create(table).and_then(|injector| injector.remove(table)).map_err(|e| e.to_string())
        }
        Err(error) => Err(format!("not tried without a table: {error}")),
    };
    findings.push(Finding::new(ingress, "packets are sent on before they reach the IP stack", forwards));
    let index = link.map_or(1, |link| link.index);
    let opened = packet_socket::open_receiver(index, &Filter::nothing(), 1 << 16).map(|_| ());
    findings.push(Finding::new(
        packet,
        "packets are held while their connection moves",
        opened.map_err(|e| format!("cannot open a packet socket: {e}; start tern-net with CAP_NET_RAW")),
    ));
    let is_protected = if table.is_ok_and(|table| table.is_protected()) {
        Ok(())
    } else {
        Err("`nft flush ruleset` also removes Tern's table, and so resets connections that have moved; \
             Linux 6.9 or newer protects it"
            .to_owned())
    };
    let sentence = "`nft flush ruleset` leaves Tern's table out";
    findings.push(Finding { optional: true, ..Finding::new(protected, sentence, is_protected) });
    let tried = tunnel::try_tap(TAP).map_err(|error| {
        format!(
            "connections do not move to nodes on other networks, nor on those that check addresses: {error}"
        )
    });
    let sentence = "connections also move to nodes on other networks";
    findings.push(Finding { optional: true, ..Finding::new(tap, sentence, tried) });
    findings
}

fn make_link() -> Result<NetworkInterface> {
    let mut links = Links::open()?;
    let pair = VethPair {
        outer: LINK,
        inner: "peer",
        inner_namespace: None,
        mtu: 1500,
        address: [2, 0, 0, 0, 0, 1],
    };
    links.create_veth(&pair)?;
    links.find(LINK)
}

/// Whether the calling thread's effective set has this capability.
fn has_capability(number: u32) -> bool {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> number & 1 == 1)
}
