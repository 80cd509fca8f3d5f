//! One inference request, as every dialect hands it to the core.

use std::time::Duration;

use bytes::Bytes;

use crate::{ModelName, RequestId, Version};

/// Request or reply headers, in order. Names are lower case: HTTP/2 has no other form.
pub type Headers = Vec<(String, String)>;

/// One named field of a request body (*torchserve-contract* 4.4).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The field's name; `body` for a body that is not a form.
    pub name: String,
    /// Its media type as sent; empty for a plain form field. Decides how a handler sees the value.
    pub content_type: String,
    /// The value, undecoded.
    pub value: Bytes,
}

/// What the caller wants of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RequestKind {
    /// An answer.
    Predict,
    /// An explanation of an answer.
    Explain,
    /// The handler's own description of the model; never batched with the others.
    Describe,
}

/// A decoded inference request.
#[derive(Debug, Clone)]
pub struct InferRequest {
    /// The server's id for it.
    pub id: RequestId,
    /// The model asked for.
    pub model: ModelName,
    /// The version asked for; `None` means the default version.
    pub version: Option<Version>,
    /// What is wanted.
    pub kind: RequestKind,
    /// The body, in order of appearance.
    pub parts: Vec<Part>,
    /// The client's headers, and those the server adds for the handler.
    pub headers: Headers,
    /// How urgent it is.
    pub urgency: Urgency,
}

/// What a caller says of how urgent its request is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Urgency {
    /// Level of the queue, 1 being the most urgent; 0 leaves it to the model, as does a level that
    /// the model does not have.
    pub priority: u32,
    /// How long the caller waits for the answer, from the arrival of the request on.
    pub timeout: Option<Duration>,
}

impl InferRequest {
    /// Bytes held by the body.
    pub fn body_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.value.len()).sum()
    }
}
