//! One accepted request and the way to answer it. Answering consumes the job, so it is answered
//! exactly once; a job that is dropped answers that its worker died.

use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use ts_types::{InferRequest, Reply};

use crate::error::ServingError;
use crate::stream::{StreamReader, StreamWriter, Unread, stream};

/// A reply or its first part, and how long the job waited for a worker.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) reply: Reply,
    /// The parts that follow, of a reply in parts.
    pub(crate) more: Option<StreamReader>,
    pub(crate) queue_time: Duration,
}

/// The caller's end of a job. Dropping it gives the job up.
pub(crate) type Answered = oneshot::Receiver<Result<Head, ServingError>>;

/// One accepted request.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) request: InferRequest,
    pub(crate) arrived: Instant,
    answer: Way,
}

/// The way to the caller.
#[derive(Debug)]
enum Way {
    /// Nothing was sent yet.
    Whole(oneshot::Sender<Result<Head, ServingError>>),
    /// The first part was sent.
    Parts(StreamWriter),
    /// The first part could not be sent: the caller had left.
    Gone,
}

impl Job {
    pub(crate) fn new(request: InferRequest, arrived: Instant) -> (Self, Answered) {
        let (answer, answered) = oneshot::channel();
        (
            Self {
                request,
                arrived,
                answer: Way::Whole(answer),
            },
            answered,
        )
    }

    /// Nobody waits for it any more: the client left or reads too slowly, or its time is over.
    pub(crate) fn is_abandoned(&self) -> bool {
        match &self.answer {
            Way::Whole(answer) => answer.is_closed(),
            Way::Parts(stream) => stream.is_unread(),
            Way::Gone => true,
        }
    }

    /// A part of its answer was sent.
    pub(crate) fn has_begun(&self) -> bool {
        !matches!(self.answer, Way::Whole(_))
    }

    /// Answers with the last or only part.
    pub(crate) fn succeed(self, reply: Reply, handed_over: Instant) {
        match self.answer {
            Way::Whole(answer) => {
                let queue_time = handed_over.saturating_duration_since(self.arrived);
                let _caller_may_have_left = answer.send(Ok(Head {
                    reply,
                    more: None,
                    queue_time,
                }));
            }
            Way::Parts(stream) => {
                if stream.push(reply.body).is_ok() {
                    stream.end(Ok(()));
                }
            }
            Way::Gone => {}
        }
    }

    /// Sends a part that is not the last. Its status and headers are those of the reply if it is
    /// the first. `limit` is what may wait unread of the parts after it.
    ///
    /// # Errors
    /// [`Unread`] when it does not reach the caller.
    pub(crate) fn part(
        &mut self,
        reply: Reply,
        handed_over: Instant,
        limit: usize,
    ) -> Result<(), Unread> {
        if let Way::Parts(stream) = &self.answer {
            return stream.push(reply.body);
        }
        let Way::Whole(answer) = std::mem::replace(&mut self.answer, Way::Gone) else {
            return Err(Unread::Left);
        };
        let (writer, reader) = stream(limit);
        let first = Head {
            reply,
            more: Some(reader),
            queue_time: handed_over.saturating_duration_since(self.arrived),
        };
        answer.send(Ok(first)).map_err(|_| Unread::Left)?;
        self.answer = Way::Parts(writer);
        Ok(())
    }

    pub(crate) fn fail(self, error: ServingError) {
        match self.answer {
            Way::Whole(answer) => {
                let _caller_may_have_left = answer.send(Err(error));
            }
            Way::Parts(stream) => stream.end(Err(error)),
            Way::Gone => {}
        }
    }
}
