//! Consistency checks for all rows.

use super::*;
use crate::route::{Route, Rule, route};
use crate::row::{Arguments, Timeout};
use crate::shape::{Amount, Len, OverLimit, Shape, When};

/// Arguments that together reach every branch of functions that depend on arguments.
fn samples(nr: u32) -> Vec<[u64; 6]> {
    let mut samples: Vec<[u64; 6]> = Vec::new();
    for value in (0..0x1_0000).chain([u64::MAX, i32::MIN as u64]) {
        samples.push([value, value, value, value, value, value]);
    }
    if nr == libc::SYS_ioctl as u32 {
        for high in [0x4004u64, 0x8004, 0x8008, 0x8018, 0xc018, 0x4008, 0xc020] {
            samples.extend((0..0x1_0000).map(|low| [0, high << 16 | low, 1, 0, 0, 0]));
        }
    }
    samples
}

/// All lists of shapes that a row can have.
fn all_shapes(row: &Row) -> Vec<&'static [Shape]> {
    match row.arguments {
        Arguments::Fixed(shapes) => vec![shapes],
        Arguments::By(by, _) => samples(row.nr).iter().map(by).collect(),
    }
}

#[test]
fn no_number_is_missing() {
    let expected = (0..=336).chain(424..NUMBERS);
    assert!(rows().map(|row| row.nr).eq(expected));
}

#[test]
fn numbers_and_names_are_those_of_the_kernel_headers() {
    let Ok(header) = std::fs::read_to_string("/usr/include/x86_64-linux-gnu/asm/unistd_64.h") else {
        return eprintln!("no kernel headers here: not compared");
    };
    let mut compared = 0;
    for line in header.lines() {
        let mut words = line.split_whitespace();
        if words.next() == Some("#define")
            && let Some(name) = words.next().and_then(|name| name.strip_prefix("__NR_"))
            && let Some(Ok(nr)) = words.next().map(str::parse)
        {
            assert_eq!(row(nr).map(|row| row.name), Some(name), "{nr}");
            compared += 1;
        }
    }
    assert!(compared > 350, "{compared}");
}

#[test]
fn newer_numbers_are_those_of_linux_raw_sys() {
    use linux_raw_sys::general as raw;
    for (nr, name) in [
        (raw::__NR_cachestat, "cachestat"),
        (raw::__NR_fchmodat2, "fchmodat2"),
        (raw::__NR_map_shadow_stack, "map_shadow_stack"),
        (raw::__NR_futex_requeue, "futex_requeue"),
        (raw::__NR_statmount, "statmount"),
        (raw::__NR_listmount, "listmount"),
        (raw::__NR_lsm_list_modules, "lsm_list_modules"),
        (raw::__NR_mseal, "mseal"),
        (raw::__NR_removexattrat, "removexattrat"),
        (raw::__NR_open_tree_attr, "open_tree_attr"),
        (raw::__NR_file_setattr, "file_setattr"),
    ] {
        assert_eq!(row(nr).map(|row| row.name), Some(name));
    }
}

#[test]
fn lengths_refer_to_arguments_that_state_them() {
    for row in rows() {
        for shapes in all_shapes(row) {
            assert!(shapes.len() <= 6, "{}", row.name);
            let is_value = |arg: u8| matches!(shapes.get(usize::from(arg)), Some(Shape::Value));
            let is_length = |arg: u8| matches!(shapes.get(usize::from(arg)), Some(Shape::Length { .. }));
            for shape in shapes {
                let stated = match shape {
                    Shape::Segments(_, arg) | Shape::Messages(_, Some(arg)) => is_value(*arg),
                    Shape::In(len) | Shape::InOut(len) | Shape::Rewritten(len) | Shape::Out(len, ..) => {
                        match len {
                            Len::Arg(count) => is_value(count.arg),
                            Len::Bits(arg) => is_value(*arg),
                            Len::Pointed(arg) => is_length(*arg),
                            Len::Embedded(embedded) => !matches!(shape, Shape::Out(..)) && embedded.max > 0,
                            Len::Fixed(len) => *len > 0,
                            Len::Of(_) => true,
                        }
                    }
                    _ => true,
                };
                assert!(stated, "{}: {shape}", row.name);
                if let Shape::Out(_, Amount::Pointed(arg), _) = shape {
                    assert!(is_length(*arg), "{}: {shape}", row.name);
                }
            }
        }
    }
}

/// Only a call that the kernel may make in part has a count that is cut. An output whose amount
/// follows from the result is written whenever the call succeeds.
#[test]
fn only_partial_transfers_are_cut() {
    for row in rows() {
        for shapes in all_shapes(row) {
            for shape in shapes {
                if let Shape::In(Len::Arg(count)) = shape
                    && count.over_limit == OverLimit::Cut
                {
                    assert!(row.flow.is_some() || row.name == "sched_setaffinity", "{}", row.name);
                }
                if let Shape::Out(_, Amount::Result { .. }, when) = shape {
                    assert!(matches!(when, When::AtLeast(0)), "{}", row.name);
                }
            }
        }
    }
}

#[test]
fn timeouts_and_masks_match_the_shapes() {
    for row in rows() {
        for shapes in all_shapes(row) {
            let native = row.rule.is_native();
            let at = |arg: u8| shapes.get(usize::from(arg));
            let right = match row.wait.map_or(Timeout::None, |wait| wait.timeout) {
                Timeout::None => true,
                Timeout::Millis(arg) => matches!(at(arg), Some(Shape::Value)),
                Timeout::Timespec(arg) | Timeout::Absolute(arg) => {
                    matches!(at(arg), Some(Shape::In(Len::Fixed(16)))) || native
                }
                Timeout::TimeLeft(arg) => {
                    matches!(at(arg), Some(Shape::TimeLeft(16) | Shape::InOut(Len::Fixed(16))))
                }
            };
            assert!(right, "{}", row.name);
            if let Some(mask) = row.mask {
                assert!(matches!(at(mask), Some(Shape::In(Len::Fixed(8)) | Shape::MaskPair)), "{}", row.name);
            }
        }
    }
}

#[test]
fn argument_functions_never_return_here() {
    for row in rows() {
        let (Rule::HereIf(_, by, words) | Rule::By(by, words)) = row.rule else { continue };
        assert!(!words.is_empty() && !words.contains("  "), "{}", row.name);
        for args in samples(row.nr) {
            assert_ne!(by(&args), Route::Here, "{}", row.name);
        }
    }
}

#[test]
fn native_rows_have_nothing_to_gather() {
    for row in rows() {
        if matches!(row.rule, Rule::Always(Route::Here)) {
            let Arguments::Fixed(shapes) = row.arguments else { panic!("{}", row.name) };
            assert!(shapes.iter().all(|shape| matches!(shape, Shape::Value | Shape::Fd)), "{}", row.name);
        }
    }
}

#[test]
fn calls_that_consume_have_outputs() {
    for row in rows().filter(|row| row.consumes) {
        let receives = |shape: &Shape| {
            use crate::shape::Direction::Receive;
            matches!(
                shape,
                Shape::Out(..) | Shape::InOut(_) | Shape::Segments(Receive, _) | Shape::Messages(Receive, _)
            )
        };
        assert!(all_shapes(row).iter().all(|shapes| shapes.iter().any(receives)), "{}", row.name);
    }
}

#[test]
fn notes_are_sentences() {
    for row in rows() {
        let note = row.note;
        assert!(note.starts_with(char::is_uppercase) && note.ends_with('.'), "{}: {note}", row.name);
        assert!(!note.contains("  ") && !note.contains('|'), "{}: {note}", row.name);
    }
}

#[test]
fn argument_dependent_routes() {
    use crate::route::{SplitCall, reason};
    let at = |nr: i64, args: &[u64]| {
        let mut six = [0; 6];
        six[..args.len()].copy_from_slice(args);
        route(nr as u32, &six)
    };
    let mmap = |prot: u64, flags: u64| at(libc::SYS_mmap, &[0, 4096, prot, flags, 3, 0]);
    assert_eq!(mmap(3, 0x22), Route::Here);
    assert_eq!(mmap(3, 0x21), Route::Both(SplitCall::Mmap));
    assert_eq!(mmap(3, 0x02), Route::Both(SplitCall::Mmap));
    assert_eq!(mmap(1, 0x01), Route::Both(SplitCall::Mmap));
    assert_eq!(mmap(3, 0x01), Route::Both(SplitCall::Mmap));
    assert_eq!(mmap(3, 0x03), Route::Both(SplitCall::Mmap));
    assert_eq!(mmap(3, 0x4_0022), Route::Homeward(reason::HUGE_PAGES));
    assert_eq!(mmap(3, 0x4_0021), Route::Homeward(reason::HUGE_PAGES));

    let clone = |flags: i32| at(libc::SYS_clone, &[flags as u64]);
    assert_eq!(clone(libc::SIGCHLD), Route::Both(SplitCall::Fork));
    assert_eq!(clone(libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD), Route::Both(SplitCall::Fork));
    assert_eq!(clone(libc::CLONE_VM), Route::Homeward(reason::SHARED_SPACE));
    let shared = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND;
    let thread = shared | libc::CLONE_THREAD | libc::CLONE_SYSVSEM | libc::CLONE_SETTLS;
    assert_eq!(clone(thread), Route::Both(SplitCall::Thread));
    for odd in [thread | libc::CLONE_VFORK, thread | libc::CLONE_PIDFD, thread & !libc::CLONE_FILES] {
        assert_eq!(clone(odd), Route::Homeward(reason::CLONE_FLAGS));
    }
    assert_eq!(clone(libc::CLONE_NEWNET), Route::Homeward(reason::NAMESPACES));

    let clock = |id: i32| at(libc::SYS_clock_gettime, &[id as u64]);
    assert_eq!(clock(1), Route::Here);
    assert_eq!(clock(2), Route::Both(SplitCall::CpuTime));
    assert_eq!(clock(-6), Route::Both(SplitCall::CpuTime));
    assert_eq!(clock(!5 << 3 | 3), Route::Home);
    assert_eq!(clock(9), Route::Home);

    let ioctl = |request: u64| at(libc::SYS_ioctl, &[0, request]);
    assert_eq!(ioctl(0x5401), Route::Home);
    assert_eq!(ioctl(0x1_0000_5401), Route::Home);
    assert_eq!(ioctl(0xdead), Route::Homeward(reason::UNKNOWN_IOCTL));
    assert_eq!(at(9999, &[]), Route::Refuse(libc::ENOSYS));
    assert_eq!(at(400, &[]), Route::Refuse(libc::ENOSYS));
}
