//! The reasons for which a connection cannot move.

use thiserror::Error;

/// Why a connection stays where it is. The socket is unchanged.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refused {
    /// Another protocol, or the socket of another family.
    #[error("the socket is not a TCP socket of IPv4 or IPv6")]
    NotTcp,
    /// `IPPROTO_MPTCP`. A subflow cannot be moved without the state of its connection.
    #[error("the connection is MPTCP, whose state the kernel does not export")]
    Mptcp,
    /// `LISTEN`.
    #[error("the socket listens; its accepted connections can move")]
    Listening,
    /// `SYN_SENT` or `SYN_RECV`.
    #[error("the connection is not established yet")]
    Connecting,
    /// `CLOSE` or `TIME_WAIT`: never connected, reset, or closed on both sides.
    #[error("the socket has no connection")]
    NotConnected,
    /// `TCP_ULP`: kernel TLS, SMC or another protocol between the program and TCP.
    #[error("an upper-layer protocol such as kernel TLS is attached to the socket")]
    UpperLayerProtocol,
    /// `TCP_AO`. The keys cannot be read. `TCP_MD5SIG` is not found: no socket option reports it.
    #[error("the connection's segments are signed (TCP-AO)")]
    Signed,
    /// `SO_ATTACH_FILTER` or `SO_ATTACH_BPF`.
    #[error("a packet filter is attached to the socket")]
    Filter,
    /// `SO_BINDTODEVICE`, or an IPv6 address that is valid on one link only.
    #[error("the socket is bound to a network device of its node")]
    BoundToDevice,
    /// `IP_TRANSPARENT`: the local address need not be one of the node's.
    #[error("the socket is transparent (IP_TRANSPARENT)")]
    Transparent,
    /// `IP_OPTIONS`, or extension headers of IPv6.
    #[error("IP options or IPv6 extension headers are set for the socket's packets")]
    PacketOptions,
    /// `IPV6_FLOWINFO_SEND`. Flow labels are leased from the node's kernel.
    #[error("the connection uses an IPv6 flow label that the program chose")]
    FlowLabel,
    /// An urgent byte was received and not read, or its mark lies ahead in the receive queue.
    #[error("urgent data is pending")]
    UrgentData,
    /// `SO_ZEROCOPY`. The number of sends cannot be read, and the program is notified by number.
    #[error("the program sends without copying (SO_ZEROCOPY)")]
    ZeroCopy,
    /// `SOF_TIMESTAMPING_OPT_ID`, or a hardware clock. The counter cannot be read.
    #[error("the program requested numbered timestamps of sent data, or a hardware clock")]
    NumberedTimestamps,
    /// `SO_ERROR` is set, or the error queue has entries.
    #[error("an error is pending on the socket")]
    ErrorPending,
    /// More than [`MAX_QUEUED`](crate::connection::MAX_QUEUED) bytes.
    #[error("more than 64 MiB are queued on the socket")]
    QueueTooLong,
    /// Another program has the socket in repair mode, or it was captured and not resumed.
    #[error("the socket is already in repair mode")]
    InRepair,
}
