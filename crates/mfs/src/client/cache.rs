//! Caching of other nodes' files, by the client and by the kernel.
//!
//! * [`validity`]: how long a reply may be cached under its lease
//! * [`invalidator`]: drops what the kernel has cached
//! * [`dentries`], [`path_retry`]: names that the kernel has cached, and path walks that met an
//!   outdated one
//! * [`name_cache`]: names, for kernels that cannot invalidate theirs
//! * [`pages`], [`pins`]: the kernel's pages of a file, and which files keep them
//! * [`renewable_lease`]: attributes, names and open files under leases that are renewed together
//! * [`xattrs`]: which extended attributes a file lacks
//! * [`unsynced`]: writes that a reset of the node would lose

pub(crate) mod dentries;
pub(crate) mod invalidator;
pub(crate) mod name_cache;
pub(crate) mod pages;
pub(crate) mod path_retry;
pub(crate) mod pins;
pub(crate) mod renewable_lease;
pub(crate) mod unsynced;
pub(crate) mod validity;
pub(crate) mod xattrs;
