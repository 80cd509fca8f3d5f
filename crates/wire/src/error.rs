//! Why a channel cannot go on. Every variant ends the channel: after one, the peer's state is
//! unknown.

/// The one call that may fail half-way through a message.
pub(crate) const SENDING: &str = "sendmsg";

/// A fault of a channel.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The other end is gone.
    #[error("the other end closed the channel")]
    Closed,
    /// Nothing arrived before the deadline, or what was to be sent did not go out.
    #[error("the other end did not speak or listen in time")]
    TimedOut,
    /// A length in a message is over what this end accepts.
    #[error("a message announces {announced} bytes, over the limit of {limit}")]
    TooLarge {
        /// Bytes announced.
        announced: u64,
        /// Bytes accepted.
        limit: u64,
    },
    /// A message that does not decode.
    #[error("a message could not be decoded: {0}")]
    Malformed(&'static str),
    /// A header that does not encode or decode.
    #[error("a message header could not be coded")]
    Header(#[from] postcard::Error),
    /// The system refused a call.
    #[error("{call} failed on a channel")]
    System {
        /// The call.
        call: &'static str,
        /// Its error.
        #[source]
        source: std::io::Error,
    },
}

impl WireError {
    /// Whether a message that failed to go out this way left the channel as it was: it was refused,
    /// or its memory could not be had, before the first byte.
    pub fn is_before_sending(&self) -> bool {
        match self {
            Self::TooLarge { .. } | Self::Header(_) => true,
            Self::System { call, .. } => *call != SENDING,
            Self::Closed | Self::TimedOut | Self::Malformed(_) => false,
        }
    }

    pub(crate) fn system(call: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::System {
            call,
            source: errno.into(),
        }
    }
}
