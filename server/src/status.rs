//! From the class of a failure to what each dialect says: the only file with the numbers of
//! failures. The match has no default, so a new class does not compile until it has its row.

use actix_web::http::StatusCode;
use ts_types::{ErrorClass, Invalid, Subject};

/// A failure in TorchServe's REST dialect: status, and the Java class that clients see as `type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TorchServe {
    /// The status.
    pub(crate) status: StatusCode,
    /// The `type` member of the body.
    pub(crate) kind: &'static str,
}

/// The row of a class in *torchserve-contract* 4.2.
pub(crate) fn torchserve(class: ErrorClass) -> TorchServe {
    use StatusCode as S;
    const OURS: &str = "InternalServerException";
    let (status, kind) = match class {
        ErrorClass::InvalidRequest(Invalid::Request) => (S::BAD_REQUEST, "BadRequestException"),
        ErrorClass::InvalidRequest(Invalid::Coding) => {
            (S::UNSUPPORTED_MEDIA_TYPE, "BadRequestException")
        }
        ErrorClass::InvalidRequest(Invalid::Model) => (S::BAD_REQUEST, "InvalidModelException"),
        ErrorClass::InvalidRequest(Invalid::Download) => {
            (S::BAD_REQUEST, "DownloadArchiveException")
        }
        ErrorClass::InvalidRequest(Invalid::Dependencies) => (S::BAD_REQUEST, "ModelException"),
        // Not 401: TorchServe's clients look for this.
        ErrorClass::Unauthenticated => (S::BAD_REQUEST, "InvalidKeyException"),
        ErrorClass::Forbidden => (S::FORBIDDEN, "InvalidModelVersionException"),
        ErrorClass::NotFound(Subject::Route) => (S::NOT_FOUND, "ResourceNotFoundException"),
        ErrorClass::NotFound(Subject::Model) => (S::NOT_FOUND, "ModelNotFoundException"),
        ErrorClass::NotFound(Subject::Version) => (S::NOT_FOUND, "ModelVersionNotFoundException"),
        ErrorClass::NotAllowed => (S::METHOD_NOT_ALLOWED, "MethodNotAllowedException"),
        ErrorClass::Conflict => (S::CONFLICT, "ConflictStatusException"),
        ErrorClass::TooLarge => (S::PAYLOAD_TOO_LARGE, "BadRequestException"),
        ErrorClass::Overloaded => (S::SERVICE_UNAVAILABLE, "ServiceUnavailableException"),
        ErrorClass::DeadlineExceeded => (S::GATEWAY_TIMEOUT, "RequestTimeoutException"),
        ErrorClass::CleanupTimeout | ErrorClass::Cancelled => {
            (S::REQUEST_TIMEOUT, "RequestTimeoutException")
        }
        ErrorClass::HandlerStatus(code) => {
            // Below 200 it would announce another response instead of being one, and some others
            // have no body to tell the handler's words in.
            let sendable = StatusCode::from_u16(code)
                .ok()
                .filter(|status| status.as_u16() >= 200 && !is_bodiless(*status));
            (sendable.unwrap_or(S::INTERNAL_SERVER_ERROR), OURS)
        }
        ErrorClass::HandlerFailed => (S::SERVICE_UNAVAILABLE, OURS),
        ErrorClass::OutOfMemory => (S::INSUFFICIENT_STORAGE, OURS),
        ErrorClass::WorkerLost | ErrorClass::WorkerStart | ErrorClass::Internal => {
            (S::INTERNAL_SERVER_ERROR, OURS)
        }
        ErrorClass::Unsupported => (S::NOT_IMPLEMENTED, "UnsupportedOperationException"),
    };
    TorchServe { status, kind }
}

/// Whether a response of this status ends with its head: a body would be read as the next response.
pub(crate) fn is_bodiless(status: StatusCode) -> bool {
    use StatusCode as S;
    status.is_informational()
        || matches!(status, S::NO_CONTENT | S::RESET_CONTENT | S::NOT_MODIFIED)
}

/// The status of `/ping` when a model has too few healthy workers.
pub(crate) const UNHEALTHY: StatusCode = StatusCode::INTERNAL_SERVER_ERROR;

/// The status of a probe when a model or the server is not ready, as Triton has it.
pub(crate) const NOT_READY: StatusCode = StatusCode::BAD_REQUEST;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rows_are_those_of_the_contract() {
        let rows = [
            (
                ErrorClass::InvalidRequest(Invalid::Request),
                400,
                "BadRequestException",
            ),
            (
                ErrorClass::InvalidRequest(Invalid::Download),
                400,
                "DownloadArchiveException",
            ),
            (ErrorClass::Unauthenticated, 400, "InvalidKeyException"),
            (ErrorClass::Forbidden, 403, "InvalidModelVersionException"),
            (
                ErrorClass::NotFound(Subject::Route),
                404,
                "ResourceNotFoundException",
            ),
            (
                ErrorClass::NotFound(Subject::Model),
                404,
                "ModelNotFoundException",
            ),
            (
                ErrorClass::NotFound(Subject::Version),
                404,
                "ModelVersionNotFoundException",
            ),
            (ErrorClass::NotAllowed, 405, "MethodNotAllowedException"),
            (ErrorClass::CleanupTimeout, 408, "RequestTimeoutException"),
            (ErrorClass::Conflict, 409, "ConflictStatusException"),
            (ErrorClass::WorkerLost, 500, "InternalServerException"),
            (ErrorClass::HandlerFailed, 503, "InternalServerException"),
            (ErrorClass::Overloaded, 503, "ServiceUnavailableException"),
            (ErrorClass::OutOfMemory, 507, "InternalServerException"),
        ];
        for (class, status, kind) in rows {
            let row = torchserve(class);
            assert_eq!((row.status.as_u16(), row.kind), (status, kind), "{class:?}");
        }
    }

    #[test]
    fn a_handler_chooses_any_status_that_can_end_a_request() {
        let status = |code| torchserve(ErrorClass::HandlerStatus(code)).status.as_u16();
        assert_eq!((status(599), status(418), status(200)), (599, 418, 200));
        assert_eq!((status(100), status(0), status(1000)), (500, 500, 500));
        // The message would be read as the start of the next response.
        assert_eq!((status(204), status(205), status(304)), (500, 500, 500));
    }
}
