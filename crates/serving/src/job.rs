//! One accepted request and the way to answer it. Answering consumes the job, so it is answered
//! exactly once; a job that is dropped answers that its worker died.

use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use ts_types::{InferRequest, Reply};

use crate::error::ServingError;

/// A reply, and how long the job waited for a worker.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) reply: Reply,
    pub(crate) queue_time: Duration,
}

/// The caller's end of a job. Dropping it gives the job up.
pub(crate) type Answered = oneshot::Receiver<Result<Answer, ServingError>>;

/// One accepted request.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) request: InferRequest,
    pub(crate) arrived: Instant,
    answer: oneshot::Sender<Result<Answer, ServingError>>,
}

impl Job {
    pub(crate) fn new(request: InferRequest, arrived: Instant) -> (Self, Answered) {
        let (answer, answered) = oneshot::channel();
        (
            Self {
                request,
                arrived,
                answer,
            },
            answered,
        )
    }

    /// Nobody waits for it any more: the client left, or its time is over.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.answer.is_closed()
    }

    pub(crate) fn succeed(self, reply: Reply, handed_over: Instant) {
        let queue_time = handed_over.saturating_duration_since(self.arrived);
        let _caller_may_have_left = self.answer.send(Ok(Answer { reply, queue_time }));
    }

    pub(crate) fn fail(self, error: ServingError) {
        let _caller_may_have_left = self.answer.send(Err(error));
    }
}
