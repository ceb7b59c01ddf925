//! Tests of the scale.

use crate::sample::node;
use tern_top::Display;
use tern_top::view::scale::{Scale, value};

fn ticks(display: Display, most: f64, lines: u16) -> (f64, Vec<f64>) {
    let node = node(1, (most * 100.0) as f32);
    let scale = Scale::of(display, &[&node], lines);
    (scale.top, scale.ticks)
}

#[test]
fn ticks_are_round_numbers() {
    assert_eq!(ticks(Display::Load, 0.3, 16), (1.0, vec![0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]));
    assert_eq!(ticks(Display::Load, 12.0, 16), (15.0, vec![0.0, 5.0, 10.0, 15.0]));
    assert_eq!(ticks(Display::Load, 7.0, 3), (10.0, vec![0.0, 10.0]));
    assert_eq!(ticks(Display::LogLoad, 12.0, 16), (16.0, vec![0.0, 1.0, 2.0, 4.0, 8.0, 16.0]));
    assert_eq!(ticks(Display::LogLoad, 1000.0, 6), (1024.0, vec![0.0, 1.0, 32.0, 1024.0]));
}

#[test]
fn heights_are_clamped_for_any_value() {
    let mut node = node(1, f32::NAN);
    let scale = Scale::of(Display::Load, &[&node], 10);
    assert_eq!((scale.top, scale.eighths(f64::NAN, 10)), (1.0, 0));
    node.load = f32::INFINITY;
    let scale = Scale::of(Display::LogLoad, &[&node], 10);
    assert_eq!(scale.eighths(value(Display::LogLoad, &node), 10), 80);
    assert_eq!(scale.eighths(-5.0, 10), 0);
    assert_eq!(Scale::of(Display::Load, &[], 0).eighths(1.0, 0), 0);
}
