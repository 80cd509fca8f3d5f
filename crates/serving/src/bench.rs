//! The queue by itself, for `benches/queue.rs`, and what the core does to name and count a request,
//! for the server's `benches/telemetry.rs`: the feature `bench` opens them, and nothing else.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::task::JoinSet;
use ts_metrics::Metrics;
use ts_types::{
    Gather, InferRequest, LevelPolicy, ModelName, Part, Reply, RequestId, RequestKind, Urgency,
    Version,
};

use crate::batch::BatchPolicy;
use crate::job::{Job, Ran, Timing};
use crate::metrics::{CoreMetrics, ModelMetrics};
use crate::names::Names;
use crate::queue::{Queue, QueueRules, Taken};

/// Ids of requests that are in use.
#[derive(Debug, Default)]
pub struct Named(Names);

impl Named {
    /// An id that no other request has, and what is held for it.
    pub fn claim(&self, id: &RequestId) -> (RequestId, impl Sized + use<>) {
        self.0.claim(id)
    }
}

/// The metrics of a model, and those that it shares with all others.
pub struct Counted {
    model: ModelMetrics,
    core: CoreMetrics,
}

impl Counted {
    /// Those of a version.
    pub fn new(metrics: &Metrics, model: &ModelName, version: &Version) -> Self {
        Self {
            model: ModelMetrics::new(metrics, model, version),
            core: CoreMetrics::new(metrics),
        }
    }

    /// A request in a batch of its own, from its arrival to its answer.
    pub fn request(&self, arrived: Instant) {
        let timing = Timing {
            queue: Duration::from_micros(20),
            batch: Duration::from_micros(30),
            handler: Duration::from_micros(10),
        };
        self.model.arrived(false);
        self.model.batch_done(&self.core, 1, timing.batch);
        self.model
            .answered(&self.core, false, arrived.elapsed(), &timing);
    }
}

/// What goes through the queue.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Requests in a batch at most.
    pub batch_size: usize,
    /// Callers, each with one request at a time.
    pub callers: usize,
    /// Requests of each caller.
    pub each: usize,
}

/// Makes, pushes, takes, answers and awaits `callers * each` requests: the callers on this thread,
/// the worker that takes and answers on one of its own, where it inherits the cores of this one.
/// Returns how long all of them took.
///
/// # Errors
/// A thread that cannot be started, a request that the queue refused or lost.
pub fn pass(model: &ModelName, load: Load) -> io::Result<Duration> {
    let Load {
        batch_size,
        callers,
        each,
    } = load;
    let rules = QueueRules {
        batch: BatchPolicy {
            size: batch_size,
            delay: Duration::ZERO,
            gather: Gather::Auto,
            preferred: Vec::new(),
        },
        capacity: callers,
        levels: vec![LevelPolicy::default()],
        job_ticket: false,
        latency_goal: None,
        sequences: None,
        resources: Vec::new(),
    };
    let queue = Arc::new(Queue::new(rules, Arc::default()));
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let worker = {
        let queue = Arc::clone(&queue);
        std::thread::Builder::new()
            .name("worker".to_owned())
            .spawn(move || answer_all(&queue))?
    };
    let began = Instant::now();
    let passed = runtime.block_on(async {
        let mut running = JoinSet::new();
        for _ in 0..callers {
            running.spawn(call(Arc::clone(&queue), model.clone(), each));
        }
        while let Some(ended) = running.join_next().await {
            ended??;
        }
        Ok(began.elapsed())
    });
    queue.close();
    worker
        .join()
        .map_err(|_| io::Error::other("the worker panicked"))?;
    passed
}

/// A caller, as `inference.rs` is one.
async fn call(queue: Arc<Queue>, model: ModelName, requests: usize) -> io::Result<()> {
    for _ in 0..requests {
        let arrived = Instant::now();
        let request = InferRequest {
            id: RequestId::random(),
            model: model.clone(),
            version: None,
            kind: RequestKind::Predict,
            parts: vec![Part {
                name: "body".to_owned(),
                content_type: "text/plain".to_owned(),
                value: Bytes::from_static(b"x"),
            }],
            headers: Vec::new(),
            urgency: Urgency::default(),
        };
        let (job, answered) = Job::new(request, arrived);
        let place = job.place();
        queue
            .push(job, Instant::now())
            .map_err(|refused| io::Error::other(format!("not queued: {refused:?}")))?;
        answered
            .await
            .map_err(io::Error::other)?
            .map_err(io::Error::other)?;
        queue.leave(&place);
    }
    Ok(())
}

/// A dispatcher whose worker answers at once.
fn answer_all(queue: &Arc<Queue>) {
    while let Taken::Batch(batch) = queue.take(0, || false, || None) {
        let handed_over = Instant::now();
        batch.running.took(handed_over.elapsed());
        for job in batch.jobs {
            let reply = Reply {
                status: 200,
                reason: String::new(),
                headers: Vec::new(),
                body: Bytes::from_static(b"ok"),
            };
            let ran = Ran {
                handed_over,
                answered: handed_over,
                handler: Duration::ZERO,
            };
            job.succeed(reply, ran);
        }
    }
}
