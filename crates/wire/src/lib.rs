//! What the server and its model hosts say to each other, and how it travels.
//!
//! - [`frame`]: the messages, as plain data.
//! - [`Channel`]: one end of a socket pair. A message is a small header; its payload (request or
//!   reply bodies) travels behind it, or through shared memory when it is large.
//! - [`Departures`]: the word that a caller has left, beside the channel, for a worker that runs.
//!
//! Both ends are always the same build of the same executable, so there is no version negotiation.

mod channel;
mod departures;
mod error;
pub mod frame;
mod shared;

pub use channel::{Channel, HangUp, Incoming, Receiver, Sender};
pub use departures::{Departed, Departures};
pub use error::WireError;

/// Encodes a message for another way than a channel: the plugin's C interface.
///
/// # Errors
/// [`WireError::Header`] when it cannot be encoded.
pub fn encode<T: serde::Serialize>(message: &T) -> Result<Vec<u8>, WireError> {
    Ok(postcard::to_stdvec(message)?)
}

/// Decodes what [`encode`] made.
///
/// # Errors
/// [`WireError::Header`] if it is not a `T`.
pub fn decode<'a, T: serde::Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, WireError> {
    Ok(postcard::from_bytes(bytes)?)
}
