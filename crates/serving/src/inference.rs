//! The one way to run a model: resolve, admit, enqueue, await, measure. Every dialect calls this.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::Stream;
use ts_types::{InferRequest, Reply, RequestId, RequestKind, TimeoutAction, with_causes};

use crate::course::Course;
use crate::error::{Refusal, ServingError};
use crate::job::{Answered, Demand, Head, Job, Place, Timing};
use crate::order::Turn;
use crate::pool::PoolSpec;
use crate::queue::NotQueued;
use crate::stream::StreamReader;
use crate::{Core, admission};

/// How often a request looks for its model again when the version it found was being removed.
const RESOLVE_ATTEMPTS: usize = 3;

/// Runs requests.
pub struct InferenceService {
    core: Arc<Core>,
}

impl InferenceService {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self { core }
    }

    /// Runs one request on the model and version that it names. Dropping the future gives the
    /// request up: it is skipped if it has not been handed to a worker. So does dropping the parts
    /// of a reply that has begun. A caller that gives a `course` sees in it where the request is.
    ///
    /// # Errors
    /// [`ServingError`]: unknown model or version, a request that is not taken, a batch that
    /// failed, a worker that was lost, an answer that came too late.
    pub async fn infer(
        &self,
        request: InferRequest,
        course: Option<Course>,
    ) -> Result<Answer, ServingError> {
        let arrived = Instant::now();
        let version_named = request.version.is_some();
        let mut request = request;
        let claim;
        (request.id, claim) = self.core.names.claim(&request.id);
        for attempt in 1.. {
            let found = self
                .core
                .registry
                .resolve(&request.model, request.version.as_ref())?;
            let spec = found.pool.spec();
            if let Some(course) = &course {
                course.arrived(arrived, &spec.version);
            }
            if attempt == 1 {
                spec.metrics.arrived(version_named);
            }
            // A version that is being removed is left to the push, which tells it apart.
            if !spec.queue.is_closed()
                && let Some(reason) = found.pool.refusal()
            {
                spec.metrics.failed();
                return Err(refused(&request, reason));
            }
            let headers = &spec.load.sequence_headers;
            let demand = admission::demand(
                &mut request,
                &spec.scheduling,
                spec.client_timeout,
                headers,
                arrived,
            );
            let limits = Limits::of(&demand, spec, arrived);
            let sequence = demand
                .sequence
                .as_ref()
                .map(|sequence| sequence.id.to_string());
            let id = request.id.clone();
            let (mut job, answered) = Job::new(request, arrived);
            job.demand = demand;
            job.claim.clone_from(&claim);
            job.course.clone_from(&course);
            let place = job.place();
            let turn = spec.order.as_ref().map(|order| order.enter());
            match spec.queue.push(job, Instant::now()) {
                Ok(()) => {
                    // The last worker may have gone between the look above and the push, and had
                    // no chance to answer what it could not see.
                    found.pool.arrived();
                    // Without the version itself, whose last user deletes its folder.
                    let spec = Arc::clone(spec);
                    let waiting = Waiting {
                        spec,
                        place,
                        id,
                        version_named,
                    };
                    drop(found);
                    let counting = Arc::clone(&waiting.spec);
                    let answer = waiting.for_answer(answered, limits, turn).await;
                    let mut answer = answer.inspect_err(|_| counting.metrics.failed())?;
                    if let Some(id) = sequence {
                        self.tell_sequence(&mut answer.reply, id);
                    }
                    return Ok(answer);
                }
                Err(NotQueued::Refused(job, reason, retry_after)) => {
                    spec.metrics.failed();
                    return Err(job.refusal(reason, retry_after));
                }
                // The default version was changed and this one removed in between: the new one
                // answers, so that a swap of versions loses nothing.
                Err(NotQueued::Closed(job)) if attempt < RESOLVE_ATTEMPTS && !version_named => {
                    request = job.request;
                }
                Err(NotQueued::Closed(job)) => {
                    spec.metrics.failed();
                    return Err(job.refusal(Refusal::Draining, Duration::ZERO));
                }
            }
        }
        unreachable!("the loop above returns")
    }

    /// Tells the caller which sequence its request belongs to, unless the handler has.
    fn tell_sequence(&self, reply: &mut Reply, id: String) {
        let name = &self.core.config.sequence_headers.id;
        if !reply
            .headers
            .iter()
            .any(|(key, _)| key.eq_ignore_ascii_case(name))
        {
            reply.headers.push((name.clone(), id));
        }
    }
}

fn refused(request: &InferRequest, reason: Refusal) -> ServingError {
    if request.kind == RequestKind::Describe
        && matches!(reason, Refusal::NoWorker | Refusal::Quarantined)
    {
        let model = request.model.clone();
        return ServingError::NoWorkerToDescribe { model };
    }
    ServingError::refused(request, reason, Duration::ZERO)
}

/// When a caller waits no longer.
#[derive(Debug, Clone, Copy)]
struct Limits {
    arrived: Instant,
    /// For a worker.
    wait_until: Option<Instant>,
    /// For the answer.
    deadline: Option<Instant>,
}

impl Limits {
    fn of(demand: &Demand, spec: &PoolSpec, arrived: Instant) -> Self {
        let policy = spec.scheduling.levels.get(demand.level);
        let rejects = policy.is_some_and(|policy| policy.timeout_action == TimeoutAction::Reject);
        Self {
            arrived,
            wait_until: demand.wait_until.filter(|_| rejects),
            deadline: demand.deadline,
        }
    }

    fn expired(&self, at: Instant) -> ServingError {
        ServingError::Expired {
            limit: at.saturating_duration_since(self.arrived),
        }
    }
}

/// A caller that waits. Dropping it gives the job up.
struct Waiting {
    spec: Arc<PoolSpec>,
    place: Place,
    id: RequestId,
    version_named: bool,
}

impl Waiting {
    async fn for_answer(
        self,
        answered: Answered,
        limits: Limits,
        turn: Option<Turn>,
    ) -> Result<Answer, ServingError> {
        let head = self.within(answered, limits).await;
        if let Some(turn) = turn {
            match limits.deadline {
                None => turn.come().await,
                Some(deadline) => {
                    let come = tokio::time::timeout_at(deadline.into(), turn.come());
                    come.await.map_err(|_| limits.expired(deadline))?;
                }
            }
        }
        let Head {
            reply,
            more,
            timing,
        } = head?;
        let Some(reader) = more else {
            let total = limits.arrived.elapsed();
            let metrics = &self.spec.metrics;
            let core = &self.spec.surroundings.core_metrics;
            metrics.answered(core, self.version_named, total, &timing);
            return Ok(Answer {
                reply,
                timing,
                more: None,
            });
        };
        let more = Parts {
            reader,
            spec: Arc::clone(&self.spec),
            id: self.id.clone(),
            arrived: limits.arrived,
            version_named: self.version_named,
            timing,
            ended: false,
        };
        Ok(Answer {
            reply,
            timing,
            more: Some(more),
        })
    }

    /// Waits for the answer as long as the limits allow.
    async fn within(&self, mut answered: Answered, limits: Limits) -> Result<Head, ServingError> {
        if let Some(until) = limits.wait_until
            && limits.deadline.is_none_or(|deadline| until < deadline)
        {
            match tokio::time::timeout_at(until.into(), &mut answered).await {
                Ok(outcome) => return outcome.unwrap_or_else(lost),
                // Once a worker has it, it may finish.
                Err(_) if self.spec.queue.leave(&self.place) => return Err(limits.expired(until)),
                Err(_) => {}
            }
        }
        match limits.deadline {
            None => answered.await.unwrap_or_else(lost),
            // The job is left at the deadline, so nobody runs it.
            Some(deadline) => match tokio::time::timeout_at(deadline.into(), answered).await {
                Ok(outcome) => outcome.unwrap_or_else(lost),
                Err(_) => Err(limits.expired(deadline)),
            },
        }
    }
}

/// A job that was dropped rather than answered went down with its dispatcher.
fn lost(_dropped: tokio::sync::oneshot::error::RecvError) -> Result<Head, ServingError> {
    Err(ServingError::WorkerDied {
        out_of_memory: false,
    })
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.spec.queue.leave(&self.place);
    }
}

/// What came of a request.
pub struct Answer {
    /// The reply, or the first part of it.
    pub reply: Reply,
    /// How long that took.
    pub timing: Timing,
    /// The bodies of the parts that follow, of a reply in parts.
    pub more: Option<Parts>,
}

/// The bodies of the parts of a reply after its first. Dropping it gives the request up. An error
/// is the last item: the reply is not whole, and the caller has to be told.
pub struct Parts {
    reader: StreamReader,
    spec: Arc<PoolSpec>,
    id: RequestId,
    arrived: Instant,
    version_named: bool,
    timing: Timing,
    ended: bool,
}

impl Stream for Parts {
    type Item = Result<Bytes, ServingError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let polled = self.reader.poll_part(context);
        let metrics = &self.spec.metrics;
        match &polled {
            Poll::Ready(Some(Err(error))) => {
                tracing::warn!(
                    request_id = %self.id,
                    reason = with_causes(error),
                    "a reply in parts was broken off"
                );
                metrics.stream_broken();
                self.ended = true;
            }
            Poll::Ready(None) if !self.ended => {
                let core = &self.spec.surroundings.core_metrics;
                let total = self.arrived.elapsed();
                metrics.answered(core, self.version_named, total, &self.timing);
                self.ended = true;
            }
            Poll::Pending | Poll::Ready(_) => {}
        }
        polled
    }
}
