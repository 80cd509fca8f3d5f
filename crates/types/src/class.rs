//! What kind of failure something is, independent of any wire. Each crate's error enum maps its
//! variants to one of these; `server/src/status.rs` maps them to each dialect's codes.

/// What a request or an archive got wrong. TorchServe shows a different `type` for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Invalid {
    /// A parameter, header or body.
    Request,
    /// The coding of a body.
    Coding,
    /// The archive or its manifest.
    Model,
    /// A model that could not be fetched.
    Download,
    /// The packages that a model asks for could not be installed.
    Dependencies,
}

/// What was not found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Subject {
    /// No such path.
    Route,
    /// No such model, or nothing to register under the given URL.
    Model,
    /// The model exists, this version does not.
    Version,
}

/// The class of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// The caller's input is wrong.
    InvalidRequest(Invalid),
    /// The caller did not show that the action is theirs to do.
    Unauthenticated,
    /// The action is understood and refused.
    Forbidden,
    /// Something the caller named does not exist.
    NotFound(Subject),
    /// The method or the API is switched off.
    NotAllowed,
    /// It exists already.
    Conflict,
    /// Over a size limit.
    TooLarge,
    /// Queue full, no worker, or draining.
    Overloaded,
    /// Not answered within the caller's or the operator's limit.
    DeadlineExceeded,
    /// Cleaning up took longer than its limit.
    CleanupTimeout,
    /// The caller has gone.
    Cancelled,
    /// A status that the handler chose.
    HandlerStatus(u16),
    /// The handler raised, or returned what cannot be sent.
    HandlerFailed,
    /// Host or device memory ran out, or the reply is over its limit.
    OutOfMemory,
    /// The worker died, or did not answer in time.
    WorkerLost,
    /// Workers could not be started.
    WorkerStart,
    /// Switched off or not built.
    Unsupported,
    /// A fault of ours.
    Internal,
}

/// An error and its causes on one line, for logs and for other processes.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// Implemented by every crate's error enum, exhaustively and without side effects.
pub trait Classify {
    /// The class that decides the status code in every dialect.
    fn class(&self) -> ErrorClass;
}
