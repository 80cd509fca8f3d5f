//! One accepted request and the way to answer it. Answering consumes the job, so it is answered
//! exactly once; a job that is dropped answers that its worker died.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use ts_types::{InferRequest, Reply};

use crate::course::{Course, Together};
use crate::error::{Refusal, ServingError};
use crate::names::Claim;
use crate::sequence::SequenceId;
use crate::stream::{StreamReader, StreamWriter, Unread, stream};

/// Where the time of an answer went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timing {
    /// From the request's arrival until the batch that answered it was handed over.
    pub queue: Duration,
    /// From there until its worker's answer, without the handler's time: the way there and back.
    pub batch: Duration,
    /// In the backend; of a reply in parts, until the first one.
    pub handler: Duration,
}

/// When a worker was given a batch, when it answered, and how much of that was its backend's time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ran {
    pub(crate) handed_over: Instant,
    pub(crate) answered: Instant,
    pub(crate) handler: Duration,
}

impl Ran {
    fn timing(self, arrived: Instant) -> Timing {
        let away = self.answered.saturating_duration_since(self.handed_over);
        Timing {
            queue: self.handed_over.saturating_duration_since(arrived),
            batch: away.saturating_sub(self.handler),
            handler: self.handler,
        }
    }
}

/// A reply or its first part, and how long that took.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) reply: Reply,
    /// The parts that follow, of a reply in parts.
    pub(crate) more: Option<StreamReader>,
    pub(crate) timing: Timing,
}

/// The caller's end of a job. Dropping it gives the job up.
pub(crate) type Answered = oneshot::Receiver<Result<Head, ServingError>>;

/// What the queue has to know of a job beside its request.
#[derive(Debug, Default)]
pub(crate) struct Demand {
    /// Level of the queue, 0 being the most urgent.
    pub(crate) level: usize,
    /// Jobs of different groups never share a batch.
    pub(crate) group: Option<Box<str>>,
    /// When the answer is of no more use. The caller's own timer answers then.
    pub(crate) deadline: Option<Instant>,
    /// When it will have waited long enough for a worker.
    pub(crate) wait_until: Option<Instant>,
    /// The sequence that it belongs to.
    pub(crate) sequence: Option<InSequence>,
}

/// A job's part in a sequence.
#[derive(Debug, Clone)]
pub(crate) struct InSequence {
    pub(crate) id: SequenceId,
    /// It is the first one.
    pub(crate) starts: bool,
    /// It is the last one.
    pub(crate) ends: bool,
}

/// One accepted request.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) request: InferRequest,
    pub(crate) arrived: Instant,
    pub(crate) demand: Demand,
    /// On its id, if that is a client's.
    pub(crate) claim: Option<Claim>,
    /// Where its caller follows it, if it does.
    pub(crate) course: Option<Course>,
    place: Place,
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
                demand: Demand::default(),
                claim: None,
                course: None,
                place: Place::default(),
                answer: Way::Whole(answer),
            },
            answered,
        )
    }

    /// Where it is, for its caller.
    pub(crate) fn place(&self) -> Place {
        self.place.clone()
    }

    /// Takes it out of the queue for a worker. Not if its caller has left.
    pub(crate) fn leave_queue(&self) -> bool {
        self.place.take()
    }

    /// It is back in the queue.
    pub(crate) fn enter_queue(&self) {
        self.place.put_back();
    }

    /// Nobody waits for it any more: the client left or reads too slowly, or its time is over.
    pub(crate) fn is_abandoned(&self) -> bool {
        match &self.answer {
            Way::Whole(answer) => self.place.is_left() || answer.is_closed(),
            Way::Parts(stream) => stream.is_unread(),
            Way::Gone => true,
        }
    }

    /// A part of its answer was sent.
    pub(crate) fn has_begun(&self) -> bool {
        !matches!(self.answer, Way::Whole(_))
    }

    /// A worker has it now, with the others of this batch.
    pub(crate) fn handed_over(&self, at: Instant, worker: u32, batch: &Together) {
        if let Some(course) = &self.course {
            course.handed_over(at, worker, batch);
        }
    }

    /// Its worker has answered, whatever the answer is.
    pub(crate) fn ran(&self, ran: Ran) {
        if let Some(course) = &self.course {
            course.ran(ran);
        }
    }

    /// Answers with the last or only part.
    pub(crate) fn succeed(self, reply: Reply, ran: Ran) {
        self.ran(ran);
        match self.answer {
            Way::Whole(answer) => {
                let timing = ran.timing(self.arrived);
                let _caller_may_have_left = answer.send(Ok(Head {
                    reply,
                    more: None,
                    timing,
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
    pub(crate) fn part(&mut self, reply: Reply, ran: Ran, limit: usize) -> Result<(), Unread> {
        self.ran(ran);
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
            timing: ran.timing(self.arrived),
        };
        answer.send(Ok(first)).map_err(|_| Unread::Left)?;
        self.answer = Way::Parts(writer);
        Ok(())
    }

    /// The error for a job that is not taken, or not run.
    pub(crate) fn refusal(&self, reason: Refusal, retry_after: Duration) -> ServingError {
        ServingError::refused(&self.request, reason, retry_after)
    }

    /// Adds a header for the handler.
    pub(crate) fn tell(&mut self, name: &str, value: String) {
        self.request.headers.push((name.to_owned(), value));
    }

    pub(crate) fn fail(self, error: ServingError) {
        if let Some(course) = &self.course {
            course.failed();
        }
        match self.answer {
            Way::Whole(answer) => {
                let _caller_may_have_left = answer.send(Err(error));
            }
            Way::Parts(stream) => stream.end(Err(error)),
            Way::Gone => {}
        }
    }
}

const WAITING: u8 = 0;
const TAKEN: u8 = 1;
const LEFT: u8 = 2;

/// Whether a job waits, was taken by a worker, or was left by its caller: whoever is first decides.
#[derive(Debug, Clone, Default)]
pub(crate) struct Place(Arc<AtomicU8>);

impl Place {
    /// The caller gives the job up. Returns whether it still waited.
    pub(crate) fn leave(&self) -> bool {
        self.change(WAITING, LEFT)
    }

    fn take(&self) -> bool {
        self.change(WAITING, TAKEN)
    }

    fn put_back(&self) {
        self.change(TAKEN, WAITING);
    }

    fn is_left(&self) -> bool {
        self.0.load(Ordering::Acquire) == LEFT
    }

    fn change(&self, from: u8, to: u8) -> bool {
        let changed = self
            .0
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
        changed.is_ok()
    }
}
