//! The connections of a table, and changes of them.

use crate::ends::{Ends, Way};
use std::collections::{BTreeMap, BTreeSet};

/// The connections of a table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Elements {
    /// Connections whose packets from the client are dropped. This precedes `forwarded`.
    pub held: BTreeSet<Ends>,
    /// Connections whose packets from the client are sent on.
    pub forwarded: BTreeMap<Ends, Way>,
    /// Connections whose packets from home's end are sent on, with the index of the interface from
    /// which these packets arrive: the outer end of a home's namespace.
    pub answers: BTreeMap<(u32, Ends), Way>,
}

/// A change of one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Drops the client's packets. A way that the connection had stays, without effect.
    Hold(Ends),
    /// Sends the client's packets on this way, and no longer drops them.
    Forward(Ends, Way),
    /// Sets the way of a connection, and goes on dropping the client's packets if it is held. Frames
    /// that come through [`crate::Injector`] take the way already.
    SetWay(Ends, Way),
    /// Removes the way of a connection, and goes on dropping the client's packets if it is held. Frames
    /// that come through [`crate::Injector`] reach the node's own IP stack already.
    ForgetWay(Ends),
    /// Neither drops nor sends on: the client's packets reach the node's own IP stack.
    Forget(Ends),
    /// Lets packets of home's end out of a home's namespace, on this way.
    Answer {
        /// Index of the outer end of the namespace's veth pair.
        from: u32,
        /// The connection.
        connection: Ends,
        /// The interface and neighbour through which the client is reached.
        way: Way,
    },
    /// Drops packets of home's end that come out of a home's namespace.
    ForgetAnswer {
        /// Index of the outer end of the namespace's veth pair.
        from: u32,
        /// The connection.
        connection: Ends,
    },
}

impl Elements {
    /// The changes that remove all that refers to this interface: answers from it, and connections and
    /// answers whose way is through it.
    #[must_use]
    pub fn changes_without(&self, interface: u32) -> Vec<Change> {
        let answers = self.answers.iter();
        let answers = answers.filter(|((from, _), way)| *from == interface || way.interface == interface);
        let answers = answers
            .map(|((from, connection), _)| Change::ForgetAnswer { from: *from, connection: *connection });
        let ways = self.forwarded.iter().filter(|(_, way)| way.interface == interface);
        answers.chain(ways.map(|(connection, _)| Change::Forget(*connection))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_without_an_interface_leave_the_others() {
        let connection =
            |port: u16| Ends::new(([10, 0, 0, 1], port).into(), ([10, 0, 0, 2], 80).into()).unwrap();
        let way = |interface| Way { interface, next_hop: [10, 0, 0, 3].into() };
        let elements = Elements {
            held: [connection(1)].into(),
            forwarded: [(connection(2), way(7)), (connection(3), way(8))].into(),
            answers: [
                ((7, connection(4)), way(1)),
                ((8, connection(4)), way(1)),
                ((8, connection(5)), way(7)),
            ]
            .into(),
        };
        assert_eq!(
            elements.changes_without(7),
            [
                Change::ForgetAnswer { from: 7, connection: connection(4) },
                Change::ForgetAnswer { from: 8, connection: connection(5) },
                Change::Forget(connection(2)),
            ]
        );
    }
}
