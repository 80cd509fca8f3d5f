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

/// The numbers that govern one model version. Every one is resolved: whoever reads them need not
/// know the layer that they came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelLimits {
    /// Workers the pool keeps at least.
    pub min_workers: usize,
    /// Workers the pool has at most.
    pub max_workers: usize,
    /// Requests in one batch at most, at least 1.
    pub batch_size: usize,
    /// How long the first request of a batch may wait for company.
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
