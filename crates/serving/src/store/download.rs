//! Bringing an archive into the store, wherever it comes from: limits, progress, going on after a
//! break, and the digest are the same for all sources.

use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use sha2::{Digest as _, Sha256};
use ts_archive::Digest;

use super::partial::{Kept, Partial};
use crate::error::ServingError;

/// How long connecting may take.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// How long a source may bring nothing.
pub(super) const IDLE_LIMIT: Duration = Duration::from_secs(60);

/// Breaks in a row after which a download is given up; enough new bytes start the count anew.
const RESUMPTIONS: u32 = 5;
const ENOUGH_BYTES: u64 = 1 << 20;

/// The wait before the first resumption; it doubles up to the last.
const FIRST_WAIT: Duration = Duration::from_millis(250);

/// How often progress is told.
const TOLD_EVERY: Duration = Duration::from_secs(5);

/// Where bytes come from.
pub(super) trait Remote: Sync {
    /// Opens it: from its start, or where `resume` says. A source that cannot go on there, or that
    /// has other bytes by now, is opened from its start.
    fn open(&self, resume: Option<&Resume>)
    -> impl Future<Output = Result<Opened, Failure>> + Send;
}

/// Where to go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Resume {
    /// Bytes that are there already.
    pub(super) from: u64,
    /// The version that they are of.
    pub(super) version: String,
}

/// An opened source.
pub(super) struct Opened {
    /// The place of the body's first byte.
    pub(super) start: u64,
    /// Bytes that the source has in all, if it says so.
    pub(super) total: Option<u64>,
    /// What changes when its bytes do, if it says so.
    pub(super) version: Option<String>,
    /// The bytes.
    pub(super) body: BoxStream<'static, Result<Bytes, String>>,
}

/// Why a source could not be opened.
#[derive(Debug)]
pub(super) struct Failure {
    /// What to tell.
    pub(super) reason: String,
    /// Another try may help.
    pub(super) passing: bool,
}

impl Failure {
    /// One that stays.
    pub(super) fn lasting(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            passing: false,
        }
    }
}

/// What may be fetched.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// `max_download_size`.
    pub(super) bytes: u64,
    /// `download_timeout`.
    pub(super) time: Duration,
}

/// A download that is to be made.
pub(super) struct Order<'o> {
    /// The URL as it was given; it may hold a signature.
    pub(super) url: &'o str,
    /// Names of parameters that may have been parts of it.
    pub(super) stray_parameters: &'o [String],
    /// The URL for logs, without its query.
    pub(super) shown: String,
    /// The file's name in the store.
    pub(super) target: &'o Path,
    /// What may be fetched.
    pub(super) bounds: Bounds,
    /// What it has to have.
    pub(super) expected: Option<Digest>,
}

impl Order<'_> {
    /// The error for a source that fails.
    pub(super) fn failed(&self, reason: &str) -> ServingError {
        let mut reason = reason.to_owned();
        if !self.stray_parameters.is_empty() {
            let names: Vec<_> = self
                .stray_parameters
                .iter()
                .take(5)
                .map(String::as_str)
                .collect();
            reason.push_str(&format!(
                ". `{}` did not reach it, being read as parameters of the registration: \
                 percent-encode the url (`&` is `%26`), or send the parameters as JSON",
                names.join("`, `")
            ));
        }
        ServingError::Download {
            url: self.url.to_owned(),
            reason,
        }
    }

    fn too_long(&self) -> ServingError {
        let limit = self.bounds.bytes;
        self.failed(&format!(
            "it is larger than the limit of {limit} bytes. Raise `max_download_size` in the \
             server's configuration"
        ))
    }

    fn unwritable(&self, reason: std::io::Error) -> ServingError {
        ServingError::StoreUnwritable {
            store: self.target.parent().unwrap_or(self.target).to_owned(),
            reason,
        }
    }

    /// Fails unless the digest is the expected one.
    pub(super) fn check(&self, found: Digest) -> Result<(), ServingError> {
        match self.expected {
            Some(expected) if expected != found => Err(ServingError::DigestMismatch {
                url: self.url.to_owned(),
                expected: expected.to_string(),
                found: found.to_string(),
            }),
            _ => Ok(()),
        }
    }
}

/// Brings the archive into the store.
///
/// # Errors
/// Source, limits, digest or disk; nothing is left in the store then.
pub(super) async fn fetch(order: &Order<'_>, remote: &impl Remote) -> Result<(), ServingError> {
    let folder = order.target.parent().unwrap_or(order.target);
    let partial = Partial::create(folder).map_err(|error| order.unwritable(error))?;
    fetch_into(partial, order, remote).await
}

async fn fetch_into(
    partial: Partial,
    order: &Order<'_>,
    remote: &impl Remote,
) -> Result<(), ServingError> {
    let started = Instant::now();
    let mut receiving = Receiving::new(partial, order);
    tracing::info!(url = order.shown, "download started");
    let limit = order.bounds.time;
    match tokio::time::timeout(limit, receiving.run(remote)).await {
        Ok(received) => received?,
        Err(_) => {
            let (seconds, bytes) = (limit.as_secs(), receiving.received);
            return Err(order.failed(&format!(
                "{bytes} bytes came within the limit of {seconds} s. Raise `download_timeout` in \
                 the server's configuration"
            )));
        }
    }
    let (bytes, found) = (receiving.received, Digest::of(receiving.hash));
    order.check(found)?;
    let kept = receiving.partial.keep_as(order.target).await;
    if kept.map_err(|error| order.unwritable(error))? == Kept::NameTaken {
        return Err(already_in_store(order.target));
    }
    tracing::info!(
        url = order.shown,
        bytes,
        seconds = started.elapsed().as_secs_f64(),
        sha256 = %found,
        "download ended"
    );
    Ok(())
}

/// The error for a name that the store has.
pub(super) fn already_in_store(target: &Path) -> ServingError {
    let name = target.file_name().unwrap_or_default();
    ServingError::AlreadyInStore {
        name: name.to_string_lossy().into_owned(),
    }
}

/// Why receiving stopped.
enum Stop {
    /// Another try may go on.
    Broken(String),
    /// Nothing helps.
    Failed(ServingError),
}

/// What has come so far.
struct Receiving<'o> {
    order: &'o Order<'o>,
    partial: Partial,
    hash: Sha256,
    received: u64,
    total: Option<u64>,
    version: Option<String>,
    /// The source has answered once, so that it is worth asking again.
    answered: bool,
    told: Instant,
}

impl<'o> Receiving<'o> {
    fn new(partial: Partial, order: &'o Order<'o>) -> Self {
        Self {
            order,
            partial,
            hash: Sha256::new(),
            received: 0,
            total: None,
            version: None,
            answered: false,
            told: Instant::now(),
        }
    }

    async fn run(&mut self, remote: &impl Remote) -> Result<(), ServingError> {
        let mut breaks = 0;
        loop {
            let before = self.received;
            let reason = match self.receive(remote).await {
                Ok(()) => return Ok(()),
                Err(Stop::Failed(error)) => return Err(error),
                Err(Stop::Broken(reason)) => reason,
            };
            if self.received >= before.saturating_add(ENOUGH_BYTES) {
                breaks = 0;
            }
            breaks += 1;
            if breaks > RESUMPTIONS {
                let bytes = self.received;
                return Err(self.order.failed(&format!(
                    "{reason}; given up after {RESUMPTIONS} more tries, at {bytes} bytes"
                )));
            }
            tracing::warn!(
                url = self.order.shown,
                bytes = self.received,
                reason,
                "download broken off, going on"
            );
            tokio::time::sleep(FIRST_WAIT * (1 << (breaks - 1))).await;
        }
    }

    /// Receives until the end, or a break.
    async fn receive(&mut self, remote: &impl Remote) -> Result<(), Stop> {
        let resume = self.version.clone().filter(|_| self.received > 0);
        let resume = resume.map(|version| Resume {
            from: self.received,
            version,
        });
        let opening = tokio::time::timeout(IDLE_LIMIT, remote.open(resume.as_ref()));
        let opened = opening.await.unwrap_or_else(|_| {
            Err(Failure {
                reason: format!("no answer for {} s", IDLE_LIMIT.as_secs()),
                passing: true,
            })
        });
        let opened = opened.map_err(|failure| {
            if failure.passing && self.answered {
                Stop::Broken(failure.reason)
            } else {
                Stop::Failed(self.order.failed(&failure.reason))
            }
        })?;
        self.answered = true;
        let mut body = opened.body;
        self.place(opened.start, opened.total, opened.version)
            .await?;
        loop {
            let next = tokio::time::timeout(IDLE_LIMIT, body.next()).await;
            let next = next.map_err(|_| {
                Stop::Broken(format!("nothing came for {} s", IDLE_LIMIT.as_secs()))
            })?;
            match next {
                None => break,
                Some(chunk) => self.take(&chunk.map_err(Stop::Broken)?).await?,
            }
        }
        match self.total {
            Some(total) if total != self.received => Err(Stop::Broken(format!(
                "it ended after {} of {total} bytes",
                self.received
            ))),
            _ => Ok(()),
        }
    }

    /// Makes what was opened the continuation of what is there, or the start.
    async fn place(
        &mut self,
        start: u64,
        total: Option<u64>,
        version: Option<String>,
    ) -> Result<(), Stop> {
        if start == 0 {
            if self.received > 0 {
                self.partial
                    .clear()
                    .await
                    .map_err(|error| self.unwritable(error))?;
                self.hash = Sha256::new();
                self.received = 0;
            }
            self.total = total;
            self.version = version;
        } else {
            let same_version = version.is_none() || version == self.version;
            if start != self.received || total != self.total || !same_version {
                // From the start the next time: never a mixture.
                self.version = None;
                return Err(Stop::Broken(
                    "it went on with other bytes than it began with".to_owned(),
                ));
            }
        }
        if self
            .total
            .is_some_and(|total| total > self.order.bounds.bytes)
        {
            return Err(Stop::Failed(self.order.too_long()));
        }
        Ok(())
    }

    async fn take(&mut self, chunk: &[u8]) -> Result<(), Stop> {
        self.received += chunk.len() as u64;
        if self.received > self.order.bounds.bytes {
            return Err(Stop::Failed(self.order.too_long()));
        }
        self.hash.update(chunk);
        let written = self.partial.write(chunk).await;
        written.map_err(|error| self.unwritable(error))?;
        if self.told.elapsed() >= TOLD_EVERY {
            self.told = Instant::now();
            let percent = self.total.map(|total| 100 * self.received / total.max(1));
            tracing::info!(
                url = self.order.shown,
                bytes = self.received,
                total = self.total,
                percent,
                "downloading"
            );
        }
        Ok(())
    }

    fn unwritable(&self, error: std::io::Error) -> Stop {
        Stop::Failed(self.order.unwritable(error))
    }
}

#[cfg(test)]
mod tests;
