//! The one way to run a model: resolve, admit, enqueue, await, measure. Every dialect calls this.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::Stream;
use ts_types::{InferRequest, Reply, RequestId, RequestKind, with_causes};

use crate::Core;
use crate::error::{Refusal, ServingError};
use crate::job::Job;
use crate::pool::PoolSpec;
use crate::queue::NotQueued;
use crate::stream::StreamReader;

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
    /// of a reply that has begun.
    ///
    /// # Errors
    /// [`ServingError`]: unknown model or version, a request that is not taken, a batch that
    /// failed, a worker that was lost, an answer that came too late.
    pub async fn infer(&self, request: InferRequest) -> Result<Answer, ServingError> {
        let arrived = Instant::now();
        let version_named = request.version.is_some();
        let mut request = request;
        for attempt in 1.. {
            let found = self
                .core
                .registry
                .resolve(&request.model, request.version.as_ref())?;
            if attempt == 1 {
                found.pool.spec().metrics.arrived(version_named);
            }
            // A version that is being removed is left to the push, which tells it apart.
            let without_workers =
                || found.pool.healthy_workers() == 0 && !found.pool.spec().queue.is_closed();
            if without_workers() {
                return Err(refused(&request, Refusal::NoWorker));
            }
            let id = request.id.clone();
            let (job, answered) = Job::new(request, arrived);
            match found.pool.spec().queue.push(job) {
                Ok(()) => {
                    if without_workers() {
                        // The last worker went between the look above and the push, and had no
                        // chance to answer what it could not see.
                        found.pool.refuse_waiting();
                    }
                    // Without the version itself, whose last user deletes its folder.
                    let spec = Arc::clone(found.pool.spec());
                    drop(found);
                    return await_answer(&spec, answered, id, arrived, version_named).await;
                }
                Err(NotQueued::Full(job)) => {
                    return Err(refused(&job.request, Refusal::QueueFull));
                }
                // The default version was changed and this one removed in between: the new one
                // answers, so that a swap of versions loses nothing.
                Err(NotQueued::Closed(job)) if attempt < RESOLVE_ATTEMPTS && !version_named => {
                    request = job.request;
                }
                Err(NotQueued::Closed(job)) => {
                    return Err(refused(&job.request, Refusal::Draining));
                }
            }
        }
        unreachable!("the loop above returns")
    }
}

fn refused(request: &InferRequest, reason: Refusal) -> ServingError {
    let model = request.model.clone();
    if request.kind == RequestKind::Describe && reason == Refusal::NoWorker {
        return ServingError::NoWorkerToDescribe { model };
    }
    ServingError::Refused {
        model,
        version: request.version.clone(),
        reason,
    }
}

async fn await_answer(
    spec: &Arc<PoolSpec>,
    answered: crate::job::Answered,
    id: RequestId,
    arrived: Instant,
    version_named: bool,
) -> Result<Answer, ServingError> {
    let limit = spec.client_timeout;
    let outcome = match limit {
        None => answered.await,
        // The receiver is dropped at the deadline, which makes the job one that nobody runs.
        Some(limit) => match tokio::time::timeout_at((arrived + limit).into(), answered).await {
            Ok(outcome) => outcome,
            Err(_) => return Err(ServingError::Expired { limit }),
        },
    };
    // A job that was dropped rather than answered went down with its dispatcher.
    let answer = outcome.unwrap_or(Err(ServingError::WorkerDied {
        out_of_memory: false,
    }))?;
    let queue_time = answer.queue_time;
    let Some(reader) = answer.more else {
        spec.metrics
            .answered(version_named, arrived.elapsed(), queue_time);
        return Ok(Answer {
            reply: answer.reply,
            more: None,
        });
    };
    Ok(Answer {
        reply: answer.reply,
        more: Some(Parts {
            reader,
            spec: Arc::clone(spec),
            id,
            arrived,
            version_named,
            queue_time,
            ended: false,
        }),
    })
}

/// What came of a request.
pub struct Answer {
    /// The reply, or the first part of it.
    pub reply: Reply,
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
    queue_time: Duration,
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
                    request = %self.id,
                    reason = with_causes(error),
                    "a reply in parts was broken off"
                );
                metrics.stream_broken();
                self.ended = true;
            }
            Poll::Ready(None) if !self.ended => {
                metrics.answered(self.version_named, self.arrived.elapsed(), self.queue_time);
                self.ended = true;
            }
            Poll::Pending | Poll::Ready(_) => {}
        }
        polled
    }
}
