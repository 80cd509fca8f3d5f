//! How the server ends once a signal tells it to, in phases that each have a limit: not ready but
//! serving; no new connections; what was accepted is answered; the workers end. Then it leaves with
//! 0. A second signal ends it at once.

use std::time::{Duration, Instant};

use actix_web::dev::ServerHandle;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::doors::Doors;
use crate::rest::Edge;

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

/// How long the phases may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Serving on, for balancers that have yet to notice (`shutdown_grace`).
    pub(crate) grace: Duration,
    /// Finishing what was accepted (`drain_timeout`).
    pub(crate) drain: Duration,
    /// Ending the workers (`worker_stop_timeout`).
    pub(crate) workers: Duration,
}

/// Ends the server in order, within the limits, or at once when another signal comes.
pub(crate) async fn shut_down(
    edge: &Edge,
    server: &ServerHandle,
    doors: Doors,
    limits: Limits,
    signals: &mut Signals,
) {
    tokio::select! {
        () = in_order(edge, server, doors, limits) => {}
        name = signals.next() => {
            tracing::warn!("{name} came a second time: ending at once");
            // Ends the workers as they are, without waiting for them.
            let _given_up = edge.management.shut_down(Duration::ZERO).await;
        }
    }
}

async fn in_order(edge: &Edge, server: &ServerHandle, mut doors: Doors, limits: Limits) {
    let began = Instant::now();
    edge.traffic.stop();
    edge.management.stop_is_near();
    if !limits.grace.is_zero() {
        let seconds = limits.grace.as_secs();
        tracing::info!("not ready any more; serving on for {seconds} s (`shutdown_grace`)");
        tokio::time::sleep(limits.grace).await;
    }

    let closing = Instant::now();
    edge.traffic.drain();
    let deadline = closing + limits.drain;
    if !doors.close(deadline).await {
        tracing::warn!("connections that nobody has taken yet are refused");
    }
    // Closes the listeners; what it returns waits for connections to end, and a client may keep its
    // own open for as long as it likes.
    drop(doors);
    drop(server.stop(true));
    let millis = closing.elapsed().as_millis();
    let open = edge.traffic.in_work();
    tracing::info!("no new connections after {millis} ms; {open} requests are in work");

    let draining = Instant::now();
    let left = edge.traffic.drained(deadline).await;
    let millis = draining.elapsed().as_millis();
    if left == 0 {
        tracing::info!("every accepted request was answered after {millis} ms");
    } else {
        tracing::warn!(
            "requests were still in work after {} s (`drain_timeout`) and were given up: {left}",
            limits.drain.as_secs()
        );
    }

    let ending = Instant::now();
    // Those that still run requests have had their time.
    let limit = if left == 0 {
        limits.workers
    } else {
        Duration::ZERO
    };
    let ended = edge.management.shut_down(limit).await;
    let millis = ending.elapsed().as_millis();
    if ended {
        tracing::info!("all workers ended after {millis} ms");
    } else {
        tracing::warn!(
            "workers that had not ended were killed after {millis} ms (`worker_stop_timeout` is {} s)",
            limits.workers.as_secs()
        );
    }
    if let Some(traces) = &edge.traces {
        traces.end().await;
    }
    tracing::info!(
        "stopped, {} ms after the signal",
        began.elapsed().as_millis()
    );
}
