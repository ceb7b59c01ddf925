//! The nftables table of a node: the connections whose packets are held, forwarded and answered.
//!
//! ```text
//!  chain of a physical interface        held4, held6          drop
//!                                       forwarded4, 6         fwd to the node, or to a home's namespace
//!                                       (none)                to the node's IP stack
//!  chain of a namespace's outer end     answers4, 6           fwd to the client
//!   and of home's end of a tunnel       (none)                drop
//!  chain of the node's end of a tunnel  held4, 6              drop
//!                                       forwarded4, 6         fwd to a home's namespace
//!                                       (none)                drop
//! ```
//!
//! A node is home for some connections and the guest's node for others. The same map serves both.

use crate::elements::{Change, Elements};
use crate::ends::{Ends, Family, Way};
use crate::error::{NEEDS_NET_ADMIN, RedirectError, Result, WithRemedy};
use crate::link::check_name;
use crate::netlink::Socket;
use crate::netlink::message::Message;
use crate::nftables::attribute::{TABLE_OWNER, TABLE_PERSIST};
use crate::nftables::element::{self, client_key, home_key, way_value};
use crate::nftables::rule::{Action, Sender, SetName, delete_rules, new_rule};
use crate::nftables::{self, DataType, INTERFACE, IPV4_ADDRESS, IPV6_ADDRESS, PORT, Policy, SetShape};
use crate::tunnel::TunnelEnd;
use std::io;

/// Remedy for an error after which the table is unchanged.
const CHECK_TABLE: &str = "check the table with `nft list table netdev NAME`, or remove it and open it again";

/// One of the sets of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Set {
    Held,
    Forwarded,
    Answers,
}

impl Set {
    const ALL: [Self; 3] = [Self::Held, Self::Forwarded, Self::Answers];

    /// Name, and number in the batch that creates the set.
    fn name(self, family: Family) -> SetName<'static> {
        let (name, id) = match (self, family) {
            (Self::Held, Family::V4) => ("held4", 1),
            (Self::Held, Family::V6) => ("held6", 2),
            (Self::Forwarded, Family::V4) => ("forwarded4", 3),
            (Self::Forwarded, Family::V6) => ("forwarded6", 4),
            (Self::Answers, Family::V4) => ("answers4", 5),
            (Self::Answers, Family::V6) => ("answers6", 6),
        };
        SetName { name, id }
    }

    fn message(self, table: &str, family: Family) -> Message {
        let address: DataType = match family {
            Family::V4 => IPV4_ADDRESS,
            Family::V6 => IPV6_ADDRESS,
        };
        let key = [INTERFACE, address, PORT, address, PORT];
        let value = [INTERFACE, address];
        let SetName { name, id } = self.name(family);
        let shape = SetShape {
            name,
            key: if self == Self::Answers { &key } else { &key[1..] },
            value: if self == Self::Held { &[] } else { &value },
        };
        nftables::new_set(table, id, &shape)
    }
}

/// The rules of a chain, each once for IPv4 and once for IPv6.
const PHYSICAL: [(Sender, Set, Action); 2] =
    [(Sender::Client, Set::Held, Action::Drop), (Sender::Client, Set::Forwarded, Action::Forward)];
const ANSWERS: [(Sender, Set, Action); 1] = [(Sender::Home, Set::Answers, Action::Forward)];

/// The nftables table of family netdev of one network namespace.
///
/// The kernel keeps the table when this value is dropped; [`Table::open`] finds it again. From Linux
/// 6.9 on, no other process can change the table while this value exists, and `nft flush ruleset`
/// leaves it out.
#[derive(Debug)]
pub struct Table {
    socket: Socket,
    name: String,
    elements: Elements,
    protected: bool,
}

impl Table {
    /// Opens the table of this name in the calling thread's network namespace, and creates it if it
    /// does not exist. The value may be used on any thread; it stays with that namespace.
    ///
    /// # Errors
    /// [`RedirectError::TableInUse`] if another process has it open, such as one that just ends (try again
    /// then); [`RedirectError::Refused`] without
    /// CAP_NET_ADMIN or nf_tables. Nothing has changed then.
    pub fn open(name: &str) -> Result<Self> {
        check_name(name)?;
        let opening = || format!("open the nftables table {name}");
        let netfilter = Some(rustix::net::netlink::NETFILTER);
        let mut socket = Socket::open(netfilter).with_remedy(opening, NEEDS_NET_ADMIN)?;
        let sets = || Family::ALL.into_iter().flat_map(|f| Set::ALL.map(|set| set.message(name, f)));
        let mut result = Ok(());
        let mut protected = false;
        // Flags that the kernel does not have are refused with EOPNOTSUPP or EINVAL.
        for flags in [TABLE_OWNER | TABLE_PERSIST, 0] {
            let messages = std::iter::once(nftables::new_table(name, flags)).chain(sets()).collect();
            result = socket.batch(nftables::batch_begin(), messages, nftables::batch_end());
            protected = flags != 0;
            if !matches!(&result, Err(e) if [Some(libc::EOPNOTSUPP), Some(libc::EINVAL)].contains(&e.raw_os_error()))
            {
                break;
            }
        }
        if let Err(error) = result {
            // Without any CAP_NET_ADMIN the kernel also answers EPERM. Then the table cannot be listed.
            let listed = socket.get(table_query(name)).is_ok();
            if error.raw_os_error() == Some(libc::EPERM) && listed {
                return Err(RedirectError::TableInUse { table: name.to_owned() });
            }
            return Err(error).with_remedy(opening, NEEDS_NET_ADMIN);
        }
        let mut table = Self { socket, name: name.to_owned(), elements: Elements::default(), protected };
        table.elements = table.read_elements()?;
        Ok(table)
    }

    /// The connections of the table. After [`Table::open`] these are the ones that an earlier process
    /// added.
    #[must_use]
    pub fn elements(&self) -> &Elements {
        &self.elements
    }

    /// Makes all these changes in one step: a packet is handled by the table before them or after
    /// them. Changes that have no effect are left out.
    ///
    /// # Errors
    /// [`RedirectError::MixedFamilies`] if a way has another IP version than its connection;
    /// [`RedirectError::Refused`] if the kernel refuses a change. The table is then unchanged.
    pub fn apply(&mut self, changes: &[Change]) -> Result<()> {
        for change in changes {
            check_families(change)?;
        }
        let mut messages = Vec::new();
        for change in changes {
            self.append(change, &mut messages);
        }
        let applied = self.batch(messages);
        if applied.is_err() {
            self.elements = self.read_elements()?;
        }
        let action = || format!("change {} connections of the nftables table {}", changes.len(), self.name);
        applied.with_remedy(action, CHECK_TABLE)
    }

    /// Filters the packets that a physical interface receives: held ones are dropped, forwarded ones
    /// are sent on, all others go to the node's IP stack. An interface with a chain gets the same
    /// chain again.
    ///
    /// # Errors
    /// [`RedirectError::Refused`] if there is no such interface or the kernel refuses the chain.
    pub fn attach(&mut self, interface: &str) -> Result<()> {
        self.add_chain(interface, &PHYSICAL, Policy::Accept)
    }

    /// Filters the packets that leave a home's namespace, which arrive at this interface: those with
    /// an answer are sent to their client, all others are dropped.
    pub(crate) fn attach_namespace(&mut self, interface: &str) -> Result<()> {
        self.add_chain(interface, &ANSWERS, Policy::Drop)
    }

    /// Filters the packets that come through the injector's pair: forwarded ones are sent on, all
    /// others go to the node's IP stack.
    pub(crate) fn attach_injector(&mut self, interface: &str) -> Result<()> {
        self.add_chain(interface, &PHYSICAL[1..], Policy::Accept)
    }

    /// Filters the packets that come through a tunnel: those that its end expects are sent on, all
    /// others are dropped.
    pub(crate) fn attach_tunnel(&mut self, interface: &str, end: TunnelEnd) -> Result<()> {
        let rules: &[_] = match end {
            TunnelEnd::Home => &ANSWERS,
            TunnelEnd::Guest => &PHYSICAL,
        };
        self.add_chain(interface, rules, Policy::Drop)
    }

    /// Whether other processes can neither change the table nor flush it.
    #[must_use]
    pub fn is_protected(&self) -> bool {
        self.protected
    }

    /// Removes the chain of an interface. An interface without a chain is no error, since older kernels
    /// delete a chain with its interface.
    ///
    /// # Errors
    /// [`RedirectError::Refused`] if the kernel refuses it; the chain is unchanged then.
    pub fn detach(&mut self, interface: &str) -> Result<()> {
        check_name(interface)?;
        let messages = vec![nftables::delete_chain(&self.name, &chain_name(interface))];
        match self.batch(messages) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            result => result.with_remedy(|| format!("remove the nftables chain of {interface}"), CHECK_TABLE),
        }
    }

    /// Removes the table with its chains and connections.
    ///
    /// # Errors
    /// [`RedirectError::Refused`]; the table is unchanged then.
    pub fn remove(mut self) -> Result<()> {
        let messages = vec![nftables::delete_table(&self.name)];
        let action = || format!("remove the nftables table {}", self.name);
        match self.socket.batch(nftables::batch_begin(), messages, nftables::batch_end()) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            result => result.with_remedy(action, CHECK_TABLE),
        }
    }

    fn add_chain(&mut self, interface: &str, uses: &[(Sender, Set, Action)], policy: Policy) -> Result<()> {
        check_name(interface)?;
        let chain = chain_name(interface);
        let mut messages = vec![
            nftables::new_chain(&self.name, &chain, interface, policy),
            delete_rules(&self.name, &chain),
        ];
        for (sender, set, action) in uses {
            for family in Family::ALL {
                messages.push(new_rule(&self.name, &chain, family, *sender, set.name(family), *action));
            }
        }
        self.batch(messages)
            .with_remedy(|| format!("filter the packets that {interface} receives"), NEEDS_NET_ADMIN)
    }

    /// Appends the messages for one change, and enters it into the copy of the elements.
    fn append(&mut self, change: &Change, messages: &mut Vec<Message>) {
        let table = self.name.as_str();
        let name = |set: Set, connection: &Ends| set.name(connection.family()).name;
        match change {
            Change::Hold(c) => {
                if self.elements.held.insert(*c) {
                    messages.push(element::add(table, name(Set::Held, c), &client_key(c), &[]));
                }
            }
            Change::Forward(c, way) => {
                if self.elements.held.remove(c) {
                    messages.push(element::remove(table, name(Set::Held, c), &client_key(c)));
                }
                let old = self.elements.forwarded.insert(*c, *way);
                replace(messages, table, name(Set::Forwarded, c), &client_key(c), old, Some(*way));
            }
            Change::SetWay(c, way) => {
                let old = self.elements.forwarded.insert(*c, *way);
                replace(messages, table, name(Set::Forwarded, c), &client_key(c), old, Some(*way));
            }
            Change::ForgetWay(c) => {
                let old = self.elements.forwarded.remove(c);
                replace(messages, table, name(Set::Forwarded, c), &client_key(c), old, None);
            }
            Change::Forget(c) => {
                if self.elements.held.remove(c) {
                    messages.push(element::remove(table, name(Set::Held, c), &client_key(c)));
                }
                let old = self.elements.forwarded.remove(c);
                replace(messages, table, name(Set::Forwarded, c), &client_key(c), old, None);
            }
            Change::Answer { from, connection: c, way } => {
                let old = self.elements.answers.insert((*from, *c), *way);
                replace(messages, table, name(Set::Answers, c), &home_key(*from, c), old, Some(*way));
            }
            Change::ForgetAnswer { from, connection: c } => {
                let old = self.elements.answers.remove(&(*from, *c));
                replace(messages, table, name(Set::Answers, c), &home_key(*from, c), old, None);
            }
        }
    }

    fn batch(&mut self, messages: Vec<Message>) -> io::Result<()> {
        if messages.is_empty() {
            return Ok(());
        }
        self.socket.batch(nftables::batch_begin(), messages, nftables::batch_end())
    }

    fn read_elements(&mut self) -> Result<Elements> {
        let mut elements = Elements::default();
        for family in Family::ALL {
            for set in Set::ALL {
                let request = element::list(&self.name, set.name(family).name);
                let action = || format!("list the connections of the nftables table {}", self.name);
                for reply in self.socket.dump(request).with_remedy(action, CHECK_TABLE)? {
                    for (key, value) in element::read(&reply) {
                        enter(&mut elements, set, family, key, value)
                            .ok_or(RedirectError::Malformed { request: "NFT_MSG_GETSETELEM" })?;
                    }
                }
            }
        }
        Ok(elements)
    }
}

/// Enters one listed element; `None` if it has another form.
fn enter(elements: &mut Elements, set: Set, family: Family, key: &[u8], value: &[u8]) -> Option<()> {
    match set {
        Set::Held => {
            elements.held.insert(element::read_client_key(family, key)?);
        }
        Set::Forwarded => {
            let connection = element::read_client_key(family, key)?;
            elements.forwarded.insert(connection, element::read_way(family, value)?);
        }
        Set::Answers => {
            let key = element::read_home_key(family, key)?;
            elements.answers.insert(key, element::read_way(family, value)?);
        }
    }
    Some(())
}

/// The messages that give an element another value. The kernel has no message for a new value of an
/// element, so it is removed and added within one batch.
fn replace(
    messages: &mut Vec<Message>,
    table: &str,
    set: &str,
    key: &[u8],
    old: Option<Way>,
    new: Option<Way>,
) {
    if old == new {
        return;
    }
    if old.is_some() {
        messages.push(element::remove(table, set, key));
    }
    if let Some(way) = new {
        messages.push(element::add(table, set, key, &way_value(&way)));
    }
}

fn check_families(change: &Change) -> Result<()> {
    let (Change::Forward(connection, way)
    | Change::SetWay(connection, way)
    | Change::Answer { connection, way, .. }) = change
    else {
        return Ok(());
    };
    if Family::of(way.next_hop) == connection.family() {
        return Ok(());
    }
    let second = std::net::SocketAddr::new(way.next_hop, 0);
    Err(RedirectError::MixedFamilies { first: connection.home(), second })
}

fn table_query(name: &str) -> Message {
    let mut message = nftables::message(libc::NFT_MSG_GETTABLE, 0);
    message.text(nftables::attribute::TABLE.name, name);
    message
}

fn chain_name(interface: &str) -> String {
    format!("from-{interface}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network_namespace::NetworkNamespace;

    #[test]
    fn flush_of_all_tables_by_another_process_leaves_the_table() {
        NetworkNamespace::create()
            .unwrap()
            .run(|| {
                let mut table = Table::open("tern").unwrap();
                let connection =
                    Ends::new("10.0.0.1:1".parse().unwrap(), "10.0.0.2:2".parse().unwrap()).unwrap();
                table.apply(&[Change::Hold(connection)]).unwrap();
                // `nft flush ruleset` deletes the tables without a name.
                let mut other = Socket::open(Some(rustix::net::netlink::NETFILTER)).unwrap();
                let flush = vec![nftables::message(libc::NFT_MSG_DELTABLE, 0)];
                other.batch(nftables::batch_begin(), flush, nftables::batch_end()).unwrap();
                assert_eq!(other.get(table_query("tern")).is_ok(), table.is_protected());
                if table.is_protected() {
                    assert_eq!(table.read_elements().unwrap(), *table.elements());
                }
            })
            .unwrap();
    }

    #[test]
    fn refused_change_leaves_the_copy_as_the_kernel_has_it() {
        NetworkNamespace::create()
            .unwrap()
            .run(|| {
                let mut table = Table::open("tern").unwrap();
                let end = |port| std::net::SocketAddr::from(([10, 0, 0, 1], port));
                let [first, second] = [1, 2].map(|port| Ends::new(end(port), end(80)).unwrap());
                table.apply(&[Change::Hold(first)]).unwrap();
                // The kernel has no such element, and refuses the batch.
                table.elements.held.insert(second);
                let changes = [Change::Forget(first), Change::Forget(second)];
                assert!(table.apply(&changes).unwrap_err().to_string().contains("check the table"));
                assert_eq!(table.elements().held, [first].into());
                assert_eq!(table.read_elements().unwrap(), *table.elements());
            })
            .unwrap();
    }
}
