//! One answer of a model.

use bytes::Bytes;

use crate::Headers;

/// What a handler answered for one request of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// HTTP status; 200 unless the handler set one.
    pub status: u16,
    /// Reason phrase set by the handler, empty otherwise.
    pub reason: String,
    /// Headers set by the handler.
    pub headers: Headers,
    /// The body.
    pub body: Bytes,
}
