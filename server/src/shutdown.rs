//! How the server ends: told to by a signal, it is not ready any more but serves on for a while if
//! the settings say so, then takes no more connections, finishes what it has accepted, and leaves
//! with 0. A second signal ends it at once.

use std::time::{Duration, Instant};

use actix_web::dev::ServerHandle;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::rest::Edge;

/// Time for the last responses to reach their clients once they are made.
const LAST_BYTES: Duration = Duration::from_secs(1);

/// The signals that end the server.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Starts to catch them.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn catch() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// The next one's name.
    pub(crate) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// How long the parts of an orderly end may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Serving on, for balancers that have yet to notice.
    pub(crate) grace: Duration,
    /// Finishing what was accepted.
    pub(crate) drain: Duration,
}

/// Ends the server in order, within the limits, or at once when another signal comes.
pub(crate) async fn shut_down(
    edge: &Edge,
    server: &ServerHandle,
    limits: Limits,
    signals: &mut Signals,
) {
    let orderly = async {
        edge.traffic.stop();
        edge.management.start_is_broken_off();
        tokio::time::sleep(limits.grace).await;
        edge.traffic.drain();
        let deadline = Instant::now() + limits.drain;
        // Stops the accepting at once; the rest of the future waits for connections to end, and a
        // client may keep its own open for long.
        let closed = tokio::spawn(server.stop(true));
        let answered = edge.traffic.drained(deadline).await;
        let left = deadline.saturating_duration_since(Instant::now());
        let finished = edge.management.shut_down(left).await;
        let _still_open = tokio::time::timeout(LAST_BYTES.min(limits.drain), closed).await;
        if answered && finished {
            tracing::info!("every accepted request was answered");
        } else {
            tracing::warn!(
                "requests were still in work after {} s and were given up",
                limits.drain.as_secs()
            );
        }
    };
    tokio::select! {
        () = orderly => {}
        name = signals.next() => {
            tracing::warn!("{name} came a second time: ending at once");
            // Ends the workers as they are, without waiting for them.
            let _given_up = edge.management.shut_down(Duration::ZERO).await;
        }
    }
}
