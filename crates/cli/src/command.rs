//! One file per command; each describes its command line and runs it.

pub mod advised;
pub mod bestnode;
pub mod completions;
pub mod doctor;
pub mod init;
pub mod join;
pub mod lab;
pub mod man;
pub mod migrate;
pub mod mon;
pub mod mosctl;
pub mod moskillall;
pub mod mosps;
pub mod mosrun;
pub mod mount_mfs;
pub mod mps;
pub mod mtop;
pub mod nomig;
pub mod runhome;
pub mod runon;
pub mod setpe;
pub mod sim;
pub mod status;
pub mod token;
pub mod tune;
