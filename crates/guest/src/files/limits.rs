//! Limits that the file cache, the calls on it, and the fast path share.

use std::time::Duration;
use tern_image::Reserve;
use tern_tracee::PAGE;

/// For how long read-ahead, names and attributes are valid without a report from home.
pub(crate) const CACHE_TERM: Duration = Duration::from_secs(1);

/// Offsets with more bits than this are left to home, because some file systems refuse them.
pub(crate) const MAX_OFFSET_BITS: u32 = 33;

/// The offset of the fast path's table in the reserved range. The buffers follow it.
pub(crate) const FASTPATH_TABLE: u64 = 8192;

/// The length of each of the fast path's two buffers, which share the rest of the reserved range,
/// except its last page.
pub(crate) const FASTPATH_BUFFER_LEN: u64 = (Reserve::LEN - PAGE - (FASTPATH_TABLE + PAGE)) / 2;
