//! A change of a pool's size, from when it is decided to when the workers are there or gone.

use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::sync::watch;

use crate::error::StartFailure;
use crate::pool::slots::Slot;
use crate::pool::{Phase, SlotStatus};

/// A change of a pool's size under way.
pub(crate) struct Resizing {
    pub(super) starting: Vec<watch::Receiver<SlotStatus>>,
    pub(super) stopping: Vec<Slot>,
    pub(super) failure: Option<StartFailure>,
}

impl Resizing {
    /// Why a slot could not be made at all.
    pub(crate) fn failed(&mut self) -> Result<(), StartFailure> {
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Waits until each new worker has come up once.
    ///
    /// # Errors
    /// The first failure of any of them, without waiting for the others.
    pub(crate) async fn started(&mut self) -> Result<(), StartFailure> {
        self.failed()?;
        try_join_all(self.starting.iter_mut().map(first_result)).await?;
        Ok(())
    }

    /// Waits until each removed worker has finished its batch and ended; after `limit` ends them
    /// as they are. Returns whether they are all gone.
    pub(crate) async fn stopped(&mut self, limit: Duration) -> bool {
        if self.all_stopped(limit).await {
            return true;
        }
        for slot in &self.stopping {
            slot.control.stop();
            slot.control.kill();
        }
        // A killed process is gone within milliseconds, unless the kernel holds it.
        self.all_stopped(Duration::from_secs(5)).await
    }

    async fn all_stopped(&mut self, limit: Duration) -> bool {
        let all = async {
            for slot in &mut self.stopping {
                // A sender that is gone has ended too.
                let _ended = slot
                    .status
                    .wait_for(|status| matches!(status.phase, Phase::Stopped | Phase::GivenUp))
                    .await;
            }
        };
        tokio::time::timeout(limit, all).await.is_ok()
    }
}

async fn first_result(status: &mut watch::Receiver<SlotStatus>) -> Result<(), StartFailure> {
    let first = status
        .wait_for(|status| {
            status.last_failure.is_some()
                || !matches!(status.phase, Phase::Starting | Phase::Waiting)
        })
        .await;
    match first {
        Ok(status) if status.phase == Phase::Ready => Ok(()),
        Ok(status) => Err(status
            .last_failure
            .clone()
            .unwrap_or_else(StartFailure::stopped)),
        Err(_) => Err(StartFailure::stopped()),
    }
}

impl StartFailure {
    pub(crate) fn stopped() -> Self {
        Self {
            text: "the worker was stopped before it came up".to_owned(),
            out_of_memory: false,
            permanent: false,
        }
    }
}
