//! What a registration asks for, after settings, archive and call were merged.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A text that names none of the known values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} `{given}`; known are {known}")]
pub struct UnknownName {
    /// What was being named.
    pub what: &'static str,
    /// The text given.
    pub given: String,
    /// The accepted values.
    pub known: &'static str,
}

macro_rules! named {
    ($(#[$doc:meta])* $name:ident, $what:literal, $known:literal {
        $($(#[$vdoc:meta])* $variant:ident = $text:literal),+ $(,)?
    }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$vdoc])* #[serde(rename = $text)] $variant),+
        }

        impl $name {
            /// The name as it is written in files and replies.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl FromStr for $name {
            type Err = UnknownName;
            fn from_str(text: &str) -> Result<Self, UnknownName> {
                match text {
                    $($text => Ok(Self::$variant),)+
                    _ => Err(UnknownName { what: $what, given: text.to_owned(), known: $known }),
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str(self.as_str())
            }
        }
    };
}

named! {
    /// What executes a model (*torchserve-contract* 3.1, `runtime`).
    Runtime, "runtime", "`python`, `python3`, `LSP`" {
        /// The Python that the server was set up with.
        Python = "python",
        /// The same; TorchServe took `python3` from the path.
        Python3 = "python3",
        /// TorchServe's C++ worker.
        Lsp = "LSP",
        /// Answers its input, needs neither torch nor Python: for tests of everything else.
        Echo = "echo",
    }
}

named! {
    /// How many workers share a host process.
    Isolation, "worker isolation", "`process`, `thread`" {
        /// One host per worker: a crash or a stuck call ends one worker only.
        Process = "process",
        /// One host per model version; its workers are threads that share an interpreter.
        Thread = "thread",
    }
}

named! {
    /// The kind of device that a model asks for.
    DeviceType, "device type", "`cpu`, `gpu`" {
        /// The processor.
        Cpu = "cpu",
        /// An accelerator.
        Gpu = "gpu",
    }
}

named! {
    /// When an idle worker waits for more requests (*batching-and-scheduling* 15.3).
    Gather, "gather mode", "`auto`, `fixed`, `strict`" {
        /// Only where experience says that company comes and is worth it.
        Auto = "auto",
        /// For the whole delay, counted from the arrival of the oldest request, as Triton.
        Fixed = "fixed",
        /// For the whole delay, counted from when the worker looked, as TorchServe.
        Strict = "strict",
    }
}

named! {
    /// What a model's files may make the server build out of pickles.
    LoadPolicy, "load policy", "`any`, `weights-only`, `strict`" {
        /// What the handler asks for.
        Any = "any",
        /// Tensors and plain data: no pickle may name anything else.
        WeightsOnly = "weights-only",
        /// The same, and no file of the model may be a pickle at all.
        Strict = "strict",
    }
}

impl LoadPolicy {
    /// The one of two that allows less.
    #[must_use]
    pub fn stricter(self, other: Self) -> Self {
        if (other as u8) > (self as u8) {
            other
        } else {
            self
        }
    }
}

/// The numbers that govern one model version. Every one is resolved: whoever reads them need not
/// know the layer that they came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelLimits {
    /// Workers the pool keeps at least.
    pub min_workers: usize,
    /// Workers the pool has at most.
    pub max_workers: usize,
    /// Whether the load moves the pool between the two.
    pub autoscale: bool,
    /// How long a worker that the load brought waits for a batch before it ends.
    pub scale_down_idle: Duration,
    /// Workers that may be lost in a row, with no batch answered in between, before no more are
    /// started.
    pub quarantine_after: u32,
    /// Requests in one batch at most, at least 1.
    pub batch_size: usize,
    /// How long a worker may wait for more requests.
    pub max_batch_delay: Duration,
    /// How long one batch may run.
    pub response_timeout: Duration,
    /// How long a worker may take to load the model.
    pub startup_timeout: Duration,
    /// Requests that may wait at once.
    pub job_queue_size: usize,
    /// How long after its first unrecovered failure a worker is still restarted.
    pub max_retry_timeout: Duration,
    /// How long a client waits for an answer; `None` means for ever.
    pub client_timeout: Option<Duration>,
    /// What each of its host processes may use.
    pub hosts: HostLimits,
}

/// What one host process may use; `None` is as much as there is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostLimits {
    /// Memory.
    pub memory_bytes: Option<u64>,
    /// Processor time, in thousandths of a core.
    pub cpu_millis: Option<u32>,
}

impl HostLimits {
    /// Whether there is anything to enforce.
    pub fn is_unlimited(self) -> bool {
        self == Self::default()
    }

    /// Cores that are enough for the processor time.
    pub fn cores(self) -> Option<usize> {
        self.cpu_millis
            .map(|millis| millis.div_ceil(1000).max(1) as usize)
    }
}

/// How the requests of one model version are put in order and into batches
/// (*batching-and-scheduling* 15.2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scheduling {
    /// When a worker waits for company.
    pub gather: Gather,
    /// Sizes that the model likes, ascending; usually none.
    pub preferred_batch_sizes: Vec<usize>,
    /// Answers leave in the order of arrival.
    pub preserve_ordering: bool,
    /// The queue's levels, the most urgent first; at least one.
    pub levels: Vec<LevelPolicy>,
    /// The level, from 0, of requests that name none.
    pub default_level: usize,
    /// A request header: requests with different values of it never share a batch.
    pub group_header: Option<String>,
    /// Requests that would be answered later than this are refused at once.
    pub latency_goal: Option<Duration>,
    /// What a batch needs of the server's resources while it runs.
    pub resources: Vec<ResourceDemand>,
    /// A request is only taken while a worker is idle (*torchserve-contract* 9.5).
    pub job_ticket: bool,
    /// Requests belong to sequences (*torchserve-contract* 9.4).
    pub sequences: Option<SequencePolicy>,
}

impl Default for Scheduling {
    fn default() -> Self {
        Self {
            gather: Gather::Auto,
            preferred_batch_sizes: Vec::new(),
            preserve_ordering: false,
            levels: vec![LevelPolicy::default()],
            default_level: 0,
            group_header: None,
            latency_goal: None,
            resources: Vec::new(),
            job_ticket: false,
            sequences: None,
        }
    }
}

/// What holds for the requests of one level of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LevelPolicy {
    /// How long a request may wait for a worker; `None` means for ever.
    pub timeout: Option<Duration>,
    /// What happens then.
    pub timeout_action: TimeoutAction,
    /// A request may ask for a shorter time.
    pub allow_timeout_override: bool,
    /// Requests of this level that may wait at once; `None` leaves it to the whole queue's limit.
    pub capacity: Option<usize>,
}

impl Default for LevelPolicy {
    fn default() -> Self {
        Self {
            timeout: None,
            timeout_action: TimeoutAction::Reject,
            allow_timeout_override: true,
            capacity: None,
        }
    }
}

named! {
    /// What happens to a request that waited too long.
    TimeoutAction, "timeout action", "`REJECT`, `DELAY`" {
        /// It is answered with an error.
        Reject = "REJECT",
        /// It goes behind all others of its level.
        Delay = "DELAY",
    }
}

/// A named resource that batches share, and how much of it one batch needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResourceDemand {
    /// The resource.
    pub name: String,
    /// Units of it.
    pub count: usize,
}

named! {
    /// Which worker runs a request of a sequence.
    SequenceStrategy, "sequence strategy", "`direct`, `oldest`" {
        /// Always the one that ran the first: the state may lie in the worker.
        Direct = "direct",
        /// Any: the state is found by the sequence's id.
        Oldest = "oldest",
    }
}

/// How sequences are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequencePolicy {
    /// Which worker runs them.
    pub strategy: SequenceStrategy,
    /// A sequence without a request for this long is over.
    pub max_idle: Duration,
    /// A sequence that began this long ago is over.
    pub timeout: Option<Duration>,
    /// Sequences at once.
    pub max_sequences: usize,
    /// Sequences that may wait for one of these to end.
    pub max_waiting_sequences: usize,
    /// Requests of one sequence that may wait.
    pub max_queued: usize,
    /// With continuous batching a request may come while an earlier one of its sequence goes on, to
    /// cancel it for example; and only a request that says so begins a sequence.
    pub continuous: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_survives_its_text_form() {
        for runtime in [
            Runtime::Python,
            Runtime::Python3,
            Runtime::Lsp,
            Runtime::Echo,
        ] {
            assert_eq!(runtime.as_str().parse::<Runtime>().unwrap(), runtime);
        }
    }

    #[test]
    fn an_unknown_name_is_told_with_the_known_ones() {
        let error = "python4".parse::<Runtime>().unwrap_err().to_string();
        assert_eq!(
            error,
            "unknown runtime `python4`; known are `python`, `python3`, `LSP`"
        );
    }
}
