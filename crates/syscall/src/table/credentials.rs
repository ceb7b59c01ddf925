//! Credentials: users, groups, capabilities, and security modules.

use super::vocabulary::*;

const ID: Shape = output(4);
const GROUPS: u64 = 65536;

/// LANDLOCK_RULE_PATH_BENEATH and LANDLOCK_RULE_NET_PORT.
fn landlock_rule(args: &[u64; 6]) -> &'static [Shape] {
    match args[1] as i32 {
        1 => const { &[FD, V, input(12), V] },
        2 => const { &[FD, V, input(16), V] },
        _ => const { &[FD, V, V, V] },
    }
}

fn landlock_route(args: &[u64; 6]) -> Route {
    match args[1] as i32 {
        1 | 2 => Route::Home,
        _ => Route::Homeward(reason::UNKNOWN_LANDLOCK),
    }
}

const LANDLOCK: &str = "The deputy opens the files, so it is the one to restrict.";
const MODULES: &str = "Security attributes are the deputy's.";
const ATTRIBUTE_BYTES: u32 = 65536;
const ATTRIBUTE_LENGTH: Shape = Shape::Length { max: ATTRIBUTE_BYTES, signed: false };

rows! {
    102 getuid HOME [] {} IDENTITY;
    104 getgid HOME [] {} IDENTITY;
    105 setuid HOME [V] {} IDENTITY;
    106 setgid HOME [V] {} IDENTITY;
    107 geteuid HOME [] {} IDENTITY;
    108 getegid HOME [] {} IDENTITY;
    113 setreuid HOME [V, V] {} IDENTITY;
    114 setregid HOME [V, V] {} IDENTITY;
    115 getgroups HOME [V, filled(counted(0, Width::Int, 4, GROUPS, OverLimit::Cut), 4)] {} IDENTITY;
    116 setgroups HOME [V, Shape::In(counted(0, Width::Int, 4, GROUPS, OverLimit::Refused))] {} IDENTITY;
    117 setresuid HOME [V, V, V] {} IDENTITY;
    118 getresuid HOME [ID, ID, ID] {} IDENTITY;
    119 setresgid HOME [V, V, V] {} IDENTITY;
    120 getresgid HOME [ID, ID, ID] {} IDENTITY;
    122 setfsuid HOME [V] {} IDENTITY;
    123 setfsgid HOME [V] {} IDENTITY;
    125 capget HOME [inout(8), inout(24)] {} IDENTITY;
    126 capset HOME [inout(8), input(24)] {} IDENTITY;
    444 landlock_create_ruleset HOME [struct_in(1, Width::Size, 4096), V, V] {} LANDLOCK;
    445 landlock_add_rule (Rule::By(landlock_route, "Home; Homeward for an unknown rule"))
        (by landlock_rule, "by the type of rule") {} LANDLOCK;
    446 landlock_restrict_self HOME [FD, V] {} LANDLOCK;
    459 lsm_get_self_attr HOME [V, Shape::InOut(Len::Pointed(2)), ATTRIBUTE_LENGTH, V] {} MODULES;
    460 lsm_set_self_attr HOME [V, struct_in(2, Width::UInt, 4096), V, V] {} MODULES;
    461 lsm_list_modules HOME
        [Shape::Out(Len::Pointed(1), Amount::Pointed(1), When::AtLeast(0)), ATTRIBUTE_LENGTH, V] {} MODULES;
}
