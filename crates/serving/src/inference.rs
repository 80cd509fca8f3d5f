//! The one way to run a model: resolve, admit, enqueue, await, measure. Every dialect calls this.

use std::sync::Arc;
use std::time::Instant;

use ts_types::{InferRequest, Reply, RequestKind};

use crate::Core;
use crate::error::{Refusal, ServingError};
use crate::job::Job;
use crate::pool::PoolSpec;
use crate::queue::NotQueued;

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
    /// request up: it is skipped if it has not been handed to a worker.
    ///
    /// # Errors
    /// [`ServingError`]: unknown model or version, a request that is not taken, a batch that
    /// failed, a worker that was lost, an answer that came too late.
    pub async fn infer(&self, request: InferRequest) -> Result<Reply, ServingError> {
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
            if !found.pool.spec().queue.is_closed()
                && let Some(reason) = found.pool.refusal()
            {
                return Err(refused(&request, reason));
            }
            let (job, answered) = Job::new(request, arrived);
            match found.pool.spec().queue.push(job) {
                Ok(()) => {
                    // The last worker may have gone between the look above and the push, and had
                    // no chance to answer what it could not see.
                    found.pool.arrived();
                    // Without the version itself, whose last user deletes its folder.
                    let spec = Arc::clone(found.pool.spec());
                    drop(found);
                    return await_answer(&spec, answered, arrived, version_named).await;
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
    if request.kind == RequestKind::Describe
        && matches!(reason, Refusal::NoWorker | Refusal::Quarantined)
    {
        return ServingError::NoWorkerToDescribe { model };
    }
    ServingError::Refused {
        model,
        version: request.version.clone(),
        reason,
    }
}

async fn await_answer(
    spec: &PoolSpec,
    answered: crate::job::Answered,
    arrived: Instant,
    version_named: bool,
) -> Result<Reply, ServingError> {
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
    spec.metrics
        .answered(version_named, arrived.elapsed(), answer.queue_time);
    Ok(answer.reply)
}
