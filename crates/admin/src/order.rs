//! What is asked of ternd by writing to a file: one value, in one write.

use crate::item::{Item, Leaf, Whose};
use rustix::io::Errno;
use tern_control::{Advice, Decay, Destination, Evacuation, Forget, Habit, Lock, Place, Request, Switch};
use tern_ids::{HomePid, NodeId};

/// No value is longer.
const MOST: usize = 256;

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Nothing, since it is so already.
    Nothing,
    /// It is done at once.
    Soon(Request),
    /// It is waited for, unless the writer is what is moved.
    Move(HomePid, Request),
    /// It is begun, and goes on by itself.
    Begin(Evacuation, Request),
    /// Of the present decay, this is to be another one.
    Decay(Leaf, u32),
}

/// What a value written to a file means; `writer` is the process that has opened it.
///
/// # Errors
/// `EINVAL` if it means nothing, `EACCES` if nothing is written there.
pub(crate) fn of(item: Item, data: &[u8], writer: Option<HomePid>) -> Result<Order, Errno> {
    let Some(leaf) = item.leaf.filter(|_| item.is_written()) else { return Err(Errno::ACCESS) };
    if data.len() > MOST {
        return Err(Errno::INVAL);
    }
    let word = std::str::from_utf8(data).map_err(|_not_text| Errno::INVAL)?.trim();
    match item.whose {
        Whose::Admin => of_admin(leaf, word),
        Whose::Decay => of_decay(leaf, word, writer.ok_or(Errno::SRCH)?),
        Whose::Process(pid) => of_process(leaf, word, pid),
        // A guest goes where its home would have it; what it is told of another node is for its home to say.
        Whose::Guest(home, pid)
            if matches!(word, "0" | "home" | "-1" | "balance") || word == home.to_string() =>
        {
            Ok(Order::Move(pid, Request::Out { pid, from: Some(home) }))
        }
        _ => Err(Errno::INVAL),
    }
}

fn number<T: std::str::FromStr>(word: &str) -> Result<T, Errno> {
    word.parse().map_err(|_no_number| Errno::INVAL)
}

fn is_on(word: &str) -> Result<bool, Errno> {
    match word {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err(Errno::INVAL),
    }
}

fn of_admin(leaf: Leaf, word: &str) -> Result<Order, Errno> {
    let switch = |switch| Ok(Order::Soon(Request::Switch { switch, on: is_on(word)? }));
    let evacuate = |what| match is_on(word)? {
        true => Ok(Order::Begin(what, Request::Evacuate { what, seconds: None })),
        // What has begun goes on.
        false => Ok(Order::Nothing),
    };
    match leaf {
        // The cluster is left, as MOSIX has it; a number is given by joining.
        Leaf::Mospe if word == "0" => Ok(Order::Soon(Request::MapOff)),
        Leaf::Stay => switch(Switch::Stay),
        Leaf::Lstay => switch(Switch::LocalStay),
        Leaf::Block => switch(Switch::Block),
        Leaf::Quiet => switch(Switch::Quiet),
        Leaf::NoMfs => switch(Switch::NoMfs),
        Leaf::Bring => evacuate(Evacuation::Bring),
        Leaf::Expel => evacuate(Evacuation::Expel),
        // 0 is the measured one.
        Leaf::OwnSpeed => {
            let speed = Some(number(word)?).filter(|speed| *speed > 0);
            Ok(Order::Soon(Request::SetSpeed { speed }))
        }
        Leaf::DecayInterval | Leaf::SlowDecay | Leaf::FastDecay => Ok(Order::Decay(leaf, number(word)?)),
        _ => Err(Errno::INVAL),
    }
}

/// The decay with one part of it changed.
pub(crate) fn decay(now: Decay, leaf: Leaf, value: u32) -> Result<Request, Errno> {
    let part = || u16::try_from(value).map_err(|_large| Errno::INVAL);
    let then = match leaf {
        Leaf::SlowDecay => Decay { slow: part()?, ..now },
        Leaf::FastDecay => Decay { fast: part()?, ..now },
        _ => Decay { interval: value, ..now },
    };
    Ok(Request::SetDecay(then))
}

fn of_decay(leaf: Leaf, word: &str, pid: HomePid) -> Result<Order, Errno> {
    if !is_on(word)? {
        return Err(Errno::INVAL);
    }
    let none = Advice::default();
    let advice = match leaf {
        Leaf::CpuJob => Advice { habit: Some(Habit::Cpu), ..none },
        Leaf::IoJob => Advice { habit: Some(Habit::Io), ..none },
        Leaf::Slow => Advice { forget: Some(Forget::Slow), ..none },
        Leaf::Fast => Advice { forget: Some(Forget::Fast), ..none },
        _ => return Err(Errno::INVAL),
    };
    Ok(Order::Soon(Request::Advise { pid, advice }))
}

fn of_process(leaf: Leaf, word: &str, pid: HomePid) -> Result<Order, Errno> {
    match leaf {
        Leaf::Goto | Leaf::Migrate => {
            let to = match word {
                "0" | "home" => Destination::Home,
                "-1" | "balance" => Destination::Balance,
                word => Destination::Node(NodeId(number(word)?)),
            };
            Ok(Order::Move(pid, Request::Migrate { pid, to }))
        }
        Leaf::Lock => {
            let lock = if is_on(word)? { Lock::Locked } else { Lock::Unlocked };
            Ok(Order::Soon(Request::SetLock { pid, lock }))
        }
        Leaf::Selected => {
            let node = Some(number(word)?).filter(|node| *node > 0).map(NodeId);
            Ok(Order::Soon(Request::Choose { pid, of: Place::Selected, node }))
        }
        _ => Err(Errno::INVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PID: HomePid = HomePid(31);

    fn written(whose: Whose, name: &str, value: &str) -> Result<Order, Errno> {
        let (item, _) = Item::files(whose).find(|(_, known)| *known == name).unwrap();
        of(item, value.as_bytes(), Some(PID))
    }

    #[test]
    fn values_mean_what_they_do_in_mosix() {
        let process = |name, value| written(Whose::Process(HomePid(7)), name, value);
        let pid = HomePid(7);
        let to = |to| Ok(Order::Move(pid, Request::Migrate { pid, to }));
        assert_eq!(process("migrate", "2\n"), to(Destination::Node(NodeId(2))));
        assert_eq!(process("goto", "0"), to(Destination::Home));
        assert_eq!(process("migrate", "home\n"), to(Destination::Home));
        assert_eq!(process("migrate", "-1"), to(Destination::Balance));
        assert_eq!(process("lock", "1"), Ok(Order::Soon(Request::SetLock { pid, lock: Lock::Locked })));
        let select = |node| Ok(Order::Soon(Request::Choose { pid, of: Place::Selected, node }));
        assert_eq!(process("selected", "3\n"), select(Some(NodeId(3))));
        assert_eq!(process("selected", "0"), select(None));
        let admin = |name, value| written(Whose::Admin, name, value);
        assert_eq!(admin("stay", "1\n"), Ok(Order::Soon(Request::Switch { switch: Switch::Stay, on: true })));
        assert_eq!(admin("mospe", "0"), Ok(Order::Soon(Request::MapOff)));
        assert_eq!(admin("speed", "0"), Ok(Order::Soon(Request::SetSpeed { speed: None })));
        assert_eq!(admin("slow-decay", "900"), Ok(Order::Decay(Leaf::SlowDecay, 900)));
        assert_eq!(admin("expel", "0"), Ok(Order::Nothing));
        let advice = Advice { habit: Some(Habit::Cpu), ..Advice::default() };
        let said = Ok(Order::Soon(Request::Advise { pid: PID, advice }));
        assert_eq!(written(Whose::Decay, "cpujob", "1"), said);
        let out = Request::Out { pid, from: Some(NodeId(3)) };
        assert_eq!(written(Whose::Guest(NodeId(3), pid), "migrate", "0"), Ok(Order::Move(pid, out)));
    }

    #[test]
    fn what_means_nothing_is_refused() {
        for (whose, name, value) in [
            (Whose::Admin, "stay", "2"),
            (Whose::Admin, "stay", ""),
            (Whose::Admin, "mospe", "7"),
            (Whose::Admin, "speed", "-1"),
            (Whose::Admin, "decay-interval", "x"),
            (Whose::Process(PID), "migrate", "70000"),
            (Whose::Process(PID), "migrate", "2 3"),
            (Whose::Process(PID), "selected", "-1"),
            (Whose::Decay, "slow", "0"),
            (Whose::Guest(NodeId(3), PID), "migrate", "2"),
        ] {
            assert_eq!(written(whose, name, value), Err(Errno::INVAL), "{name} {value}");
        }
        assert_eq!(written(Whose::Process(PID), "where", "2"), Err(Errno::ACCESS));
        assert_eq!(written(Whose::Admin, "stay", &"1".repeat(300)), Err(Errno::INVAL));
        let (item, _) = Item::files(Whose::Admin).next().unwrap();
        assert_eq!(of(item, &[0xff, 0xfe], None), Err(Errno::INVAL));
        assert!(decay(Decay::default(), Leaf::FastDecay, 70_000).is_err());
        let then = Request::SetDecay(Decay { slow: 5, ..Decay::default() });
        assert_eq!(decay(Decay::default(), Leaf::SlowDecay, 5), Ok(then));
    }
}
