//! The meaning of a value written to a file. Each write contains one whole value.

use crate::inode::{Dir, Inode, Leaf};
use rustix::io::Errno;
use tern_control::{
    Advice, DecayClass, DecayRates, Destination, Evacuation, Lock, Request, Switch, SymbolicNode, Workload,
};
use tern_ids::{HomePid, NodeId};

/// Maximum length of a value in bytes.
const MAX_VALUE_LEN: usize = 256;

/// The effect of a write.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum WriteAction {
    /// Nothing: the requested state is the current one.
    Nothing,
    /// A request to ternd that is answered at once.
    Immediate(Request),
    /// A migration: the write waits for it, unless the writer itself is to move.
    Move(HomePid, Request),
    /// An evacuation: it is started, and continues in the background.
    Start(Evacuation, Request),
    /// Changes one parameter of the current decay settings.
    SetDecay(Leaf, u32),
}

/// The action for a value written to a file that the process `opened_by` has opened.
///
/// # Errors
/// `EINVAL` if the value is not valid, `EACCES` if the file is not writable.
pub(crate) fn parse(inode: Inode, data: &[u8], opened_by: Option<HomePid>) -> Result<WriteAction, Errno> {
    let Some(leaf) = inode.leaf.filter(|_| inode.is_writable()) else { return Err(Errno::ACCESS) };
    if data.len() > MAX_VALUE_LEN {
        return Err(Errno::INVAL);
    }
    let word = std::str::from_utf8(data).map_err(|_not_text| Errno::INVAL)?.trim();
    match inode.dir {
        Dir::Admin => parse_admin(leaf, word),
        Dir::Decay => parse_decay(leaf, word, opened_by.ok_or(Errno::SRCH)?),
        Dir::Process(pid) => parse_process(leaf, word, pid),
        // Whichever of these values is written, the guest's home chooses where it goes.
        Dir::Guest(home, pid)
            if matches!(word, "0" | "home" | "-1" | "balance") || word == home.to_string() =>
        {
            Ok(WriteAction::Move(pid, Request::LeaveNode { pid, from: Some(home) }))
        }
        _ => Err(Errno::INVAL),
    }
}

fn parse_number<T: std::str::FromStr>(word: &str) -> Result<T, Errno> {
    word.parse().map_err(|_no_number| Errno::INVAL)
}

fn parse_switch(word: &str) -> Result<bool, Errno> {
    match word {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err(Errno::INVAL),
    }
}

fn parse_admin(leaf: Leaf, word: &str) -> Result<WriteAction, Errno> {
    let switch = |switch| Ok(WriteAction::Immediate(Request::Switch { switch, on: parse_switch(word)? }));
    let evacuate = |what| match parse_switch(word)? {
        true => Ok(WriteAction::Start(what, Request::Evacuate { what, seconds: None })),
        // An evacuation cannot be cancelled.
        false => Ok(WriteAction::Nothing),
    };
    match leaf {
        // The node leaves the cluster, as with MOSIX. Other values are refused: joining assigns a
        // number.
        Leaf::Mospe if word == "0" => Ok(WriteAction::Immediate(Request::MapOff)),
        Leaf::Stay => switch(Switch::Stay),
        Leaf::Lstay => switch(Switch::LocalStay),
        Leaf::Block => switch(Switch::Block),
        Leaf::Quiet => switch(Switch::Quiet),
        Leaf::NoMfs => switch(Switch::NoMfs),
        Leaf::Bring => evacuate(Evacuation::Bring),
        Leaf::Expel => evacuate(Evacuation::Expel),
        // 0 selects the measured speed.
        Leaf::OwnSpeed => {
            let speed = Some(parse_number(word)?).filter(|speed| *speed > 0);
            Ok(WriteAction::Immediate(Request::SetSpeed { speed }))
        }
        Leaf::DecayInterval | Leaf::SlowDecay | Leaf::FastDecay => {
            Ok(WriteAction::SetDecay(leaf, parse_number(word)?))
        }
        _ => Err(Errno::INVAL),
    }
}

/// The request that changes one parameter of the decay settings.
pub(crate) fn decay_request(current: DecayRates, leaf: Leaf, value: u32) -> Result<Request, Errno> {
    let decay = || u16::try_from(value).map_err(|_large| Errno::INVAL);
    let changed = match leaf {
        Leaf::SlowDecay => DecayRates { slow: decay()?, ..current },
        Leaf::FastDecay => DecayRates { fast: decay()?, ..current },
        _ => DecayRates { interval: value, ..current },
    };
    Ok(Request::SetDecay(changed))
}

fn parse_decay(leaf: Leaf, word: &str, pid: HomePid) -> Result<WriteAction, Errno> {
    if !parse_switch(word)? {
        return Err(Errno::INVAL);
    }
    let no_advice = Advice::default();
    let advice = match leaf {
        Leaf::CpuJob => Advice { workload: Some(Workload::Cpu), ..no_advice },
        Leaf::IoJob => Advice { workload: Some(Workload::Io), ..no_advice },
        Leaf::Slow => Advice { decay: Some(DecayClass::Slow), ..no_advice },
        Leaf::Fast => Advice { decay: Some(DecayClass::Fast), ..no_advice },
        _ => return Err(Errno::INVAL),
    };
    Ok(WriteAction::Immediate(Request::Advise { pid, advice }))
}

fn parse_process(leaf: Leaf, word: &str, pid: HomePid) -> Result<WriteAction, Errno> {
    match leaf {
        Leaf::Goto | Leaf::Migrate => {
            let to = match word {
                "0" | "home" => Destination::Home,
                "-1" | "balance" => Destination::Balance,
                word => Destination::Node(NodeId(parse_number(word)?)),
            };
            Ok(WriteAction::Move(pid, Request::Migrate { pid, to }))
        }
        Leaf::Lock => {
            let lock = if parse_switch(word)? { Lock::Locked } else { Lock::Unlocked };
            Ok(WriteAction::Immediate(Request::SetLock { pid, lock }))
        }
        Leaf::Selected => {
            let node = Some(parse_number(word)?).filter(|node| *node > 0).map(NodeId);
            Ok(WriteAction::Immediate(Request::SetSymbolicNode { pid, name: SymbolicNode::Selected, node }))
        }
        _ => Err(Errno::INVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PID: HomePid = HomePid(31);

    fn write(dir: Dir, name: &str, value: &str) -> Result<WriteAction, Errno> {
        let (inode, _) = Inode::files(dir).find(|(_, known)| *known == name).unwrap();
        parse(inode, value.as_bytes(), Some(PID))
    }

    #[test]
    fn values_mean_the_same_as_with_mosix() {
        let process = |name, value| write(Dir::Process(HomePid(7)), name, value);
        let pid = HomePid(7);
        let to = |to| Ok(WriteAction::Move(pid, Request::Migrate { pid, to }));
        assert_eq!(process("migrate", "2\n"), to(Destination::Node(NodeId(2))));
        assert_eq!(process("goto", "0"), to(Destination::Home));
        assert_eq!(process("migrate", "home\n"), to(Destination::Home));
        assert_eq!(process("migrate", "-1"), to(Destination::Balance));
        assert_eq!(
            process("lock", "1"),
            Ok(WriteAction::Immediate(Request::SetLock { pid, lock: Lock::Locked }))
        );
        let select = |node| {
            Ok(WriteAction::Immediate(Request::SetSymbolicNode { pid, name: SymbolicNode::Selected, node }))
        };
        assert_eq!(process("selected", "3\n"), select(Some(NodeId(3))));
        assert_eq!(process("selected", "0"), select(None));
        let admin = |name, value| write(Dir::Admin, name, value);
        assert_eq!(
            admin("stay", "1\n"),
            Ok(WriteAction::Immediate(Request::Switch { switch: Switch::Stay, on: true }))
        );
        assert_eq!(admin("mospe", "0"), Ok(WriteAction::Immediate(Request::MapOff)));
        assert_eq!(admin("speed", "0"), Ok(WriteAction::Immediate(Request::SetSpeed { speed: None })));
        assert_eq!(admin("slow-decay", "900"), Ok(WriteAction::SetDecay(Leaf::SlowDecay, 900)));
        assert_eq!(admin("expel", "0"), Ok(WriteAction::Nothing));
        let advice = Advice { workload: Some(Workload::Cpu), ..Advice::default() };
        let expected = Ok(WriteAction::Immediate(Request::Advise { pid: PID, advice }));
        assert_eq!(write(Dir::Decay, "cpujob", "1"), expected);
        let out = Request::LeaveNode { pid, from: Some(NodeId(3)) };
        assert_eq!(write(Dir::Guest(NodeId(3), pid), "migrate", "0"), Ok(WriteAction::Move(pid, out)));
    }

    #[test]
    fn invalid_values_are_refused() {
        for (dir, name, value) in [
            (Dir::Admin, "stay", "2"),
            (Dir::Admin, "stay", ""),
            (Dir::Admin, "mospe", "7"),
            (Dir::Admin, "speed", "-1"),
            (Dir::Admin, "decay-interval", "x"),
            (Dir::Process(PID), "migrate", "70000"),
            (Dir::Process(PID), "migrate", "2 3"),
            (Dir::Process(PID), "selected", "-1"),
            (Dir::Decay, "slow", "0"),
            (Dir::Guest(NodeId(3), PID), "migrate", "2"),
        ] {
            assert_eq!(write(dir, name, value), Err(Errno::INVAL), "{name} {value}");
        }
        assert_eq!(write(Dir::Process(PID), "where", "2"), Err(Errno::ACCESS));
        assert_eq!(write(Dir::Admin, "stay", &"1".repeat(300)), Err(Errno::INVAL));
        let (inode, _) = Inode::files(Dir::Admin).next().unwrap();
        assert_eq!(parse(inode, &[0xff, 0xfe], None), Err(Errno::INVAL));
        assert!(decay_request(DecayRates::default(), Leaf::FastDecay, 70_000).is_err());
        let expected = Request::SetDecay(DecayRates { slow: 5, ..DecayRates::default() });
        assert_eq!(decay_request(DecayRates::default(), Leaf::SlowDecay, 5), Ok(expected));
    }
}
