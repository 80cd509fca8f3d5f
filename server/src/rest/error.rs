//! What can go wrong at the edge, before or after the core was asked.

use actix_web::http::header::HeaderName;
use ts_serving::ServingError;
use ts_types::{Classify, ErrorClass, IdError, Invalid, Subject, UnknownName};

use crate::auth::{Denied, NotRenewed};
use crate::budget::MemoryFull;

/// A failed request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RestError {
    /// No such path on this listener.
    #[error("Requested resource is not found, please refer to API document.")]
    NoSuchRoute,
    /// The path exists, not for this method; or its API is switched off.
    #[error("Requested method is not allowed, please refer to API document.")]
    NotAllowed,
    /// No token, or not the right one.
    #[error(
        "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
    )]
    Unauthorized,
    /// The same, for renewing a token.
    #[error(
        "Token Authentication failed. Token either incorrect, expired, or not provided correctly"
    )]
    RenewalUnauthorized,
    /// A filter of log lines that is none.
    #[error("the log filter is not changed: {reason}")]
    LogFilter {
        /// What is wrong with it.
        reason: String,
    },
    /// The path is not UTF-8 once decoded.
    #[error("the path `{path}` is not UTF-8 once it is decoded")]
    PathNotText {
        /// As sent.
        path: String,
    },
    /// The body is over `max_request_size`. The client sees the status only.
    #[error(
        "the body is over the limit of {limit} bytes (`max_request_size`, or `max_body_memory` where \
         that is less). Raise it, or send less"
    )]
    TooLarge {
        /// The limit.
        limit: usize,
    },
    /// The bodies of all requests take what they may.
    #[error(transparent)]
    MemoryFull(#[from] MemoryFull),
    /// The body did not arrive.
    #[error("the body could not be read: {reason}")]
    BrokenBody {
        /// The transport's words.
        reason: String,
    },
    /// The body arrives too slowly.
    #[error("nothing of the body arrived for {seconds} seconds (`request_body_timeout`)")]
    StalledBody {
        /// The limit.
        seconds: u64,
    },
    /// The body drips.
    #[error(
        "the body brings less than {bytes_per_second} bytes a second after `request_body_timeout`"
    )]
    SlowBody {
        /// The limit.
        bytes_per_second: u64,
    },
    /// A body in a coding that is not known, or in several.
    #[error(
        "the body's content-encoding is `{coding}`. Known are {}, one at a time",
        super::coding::KNOWN
    )]
    UnknownCoding {
        /// As sent.
        coding: String,
    },
    /// A body that is not what its coding says.
    #[error("the body could not be decompressed as `{coding}`: {reason}")]
    BadCoding {
        /// The coding.
        coding: &'static str,
        /// The library's words.
        reason: String,
    },
    /// A form that is none.
    #[error("the form could not be read: {reason}")]
    BadForm {
        /// The parser's words.
        reason: String,
    },
    /// A form with too many fields.
    #[error(
        "the form has more than {limit} fields. Raise `max_request_parts` in the server's \
         configuration"
    )]
    TooManyParts {
        /// The limit.
        limit: usize,
    },
    /// A JSON body that is none.
    #[error("the body is not a JSON object: {reason}")]
    BadJson {
        /// The parser's words.
        reason: String,
    },
    /// A header that has to be a number.
    #[error("the header `{name}` is `{value}`, which is not a whole number")]
    BadHeader {
        /// Its name.
        name: HeaderName,
        /// As sent.
        value: String,
    },
    /// A parameter that has to be there.
    #[error("Parameter {name} is required.")]
    MissingParameter {
        /// Its name.
        name: &'static str,
    },
    /// A parameter that is neither on nor off.
    #[error("parameter `{name}` is neither `true` nor `false`")]
    BadSwitch {
        /// Its name.
        name: &'static str,
    },
    /// A limit that is out of its bounds, or no number.
    #[error("parameter `{name}` is not a whole number from {least} to {most}")]
    BadLimit {
        /// Its name.
        name: &'static str,
        /// The least value.
        least: u64,
        /// The greatest.
        most: u64,
    },
    /// A runtime that does not exist.
    #[error("Invalid RuntimeType value: {value}")]
    BadRuntime {
        /// As sent.
        value: String,
    },
    /// Fewer than no workers. TorchServe fails with 500 here, and clients check for it.
    #[error("min_worker cannot be negative: {value}")]
    NegativeWorkers {
        /// As sent.
        value: i64,
    },
    /// A name or version that is none.
    #[error(transparent)]
    BadId(#[from] IdError),
    /// A value that is none of the known ones.
    #[error(transparent)]
    UnknownName(#[from] UnknownName),
    /// A status that no response can have.
    #[error("the handler set the status {status}, which no response can have")]
    BadStatus {
        /// The status.
        status: u16,
    },
    /// More headers than a client will read.
    #[error(
        "the handler set {bytes} bytes of headers, over the limit of {limit}. Send large values in \
         the body"
    )]
    HeadersTooLarge {
        /// Their size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The handler did not describe its model. The words are TorchServe's.
    #[error("Failed to get customized model matadata.")]
    NotDescribed(#[source] ServingError),
    /// A token was not replaced.
    #[error(transparent)]
    NotRenewed(NotRenewed),
    /// The core refused or failed.
    #[error(transparent)]
    Serving(#[from] ServingError),
}

impl From<Denied> for RestError {
    fn from(denied: Denied) -> Self {
        match denied {
            Denied::SwitchedOff => Self::NotAllowed,
            Denied::Token => Self::Unauthorized,
            Denied::RenewalToken => Self::RenewalUnauthorized,
        }
    }
}

impl From<NotRenewed> for RestError {
    fn from(reason: NotRenewed) -> Self {
        match reason {
            NotRenewed::NoTokens => Self::NoSuchRoute,
            reason => Self::NotRenewed(reason),
        }
    }
}

impl Classify for RestError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::NoSuchRoute => ErrorClass::NotFound(Subject::Route),
            Self::NotAllowed => ErrorClass::NotAllowed,
            Self::Unauthorized | Self::RenewalUnauthorized => ErrorClass::Unauthenticated,
            Self::LogFilter { .. }
            | Self::PathNotText { .. }
            | Self::BrokenBody { .. }
            | Self::StalledBody { .. }
            | Self::SlowBody { .. }
            | Self::BadCoding { .. }
            | Self::BadForm { .. }
            | Self::TooManyParts { .. }
            | Self::BadJson { .. }
            | Self::BadHeader { .. }
            | Self::MissingParameter { .. }
            | Self::BadRuntime { .. }
            | Self::BadSwitch { .. }
            | Self::BadLimit { .. }
            | Self::BadId(_)
            | Self::NotRenewed(NotRenewed::NoTokens | NotRenewed::Given)
            | Self::UnknownName(_) => ErrorClass::InvalidRequest(Invalid::Request),
            Self::UnknownCoding { .. } => ErrorClass::InvalidRequest(Invalid::Coding),
            Self::TooLarge { .. } => ErrorClass::TooLarge,
            Self::MemoryFull(_) => ErrorClass::Overloaded,
            Self::NegativeWorkers { .. } => ErrorClass::WorkerStart,
            Self::BadStatus { .. } | Self::HeadersTooLarge { .. } => ErrorClass::HandlerFailed,
            Self::NotDescribed(_) => ErrorClass::WorkerLost,
            Self::NotRenewed(NotRenewed::KeyFile(_)) => ErrorClass::Internal,
            Self::Serving(error) => error.class(),
        }
    }
}
