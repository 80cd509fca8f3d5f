//! Metrics of the host, on a thread of their own (*torchserve-contract* 6.3).

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sysinfo::{Disks, System};
use ts_metrics::{Builtin, Metric, Metrics, hostname, names};

use super::gpu::Gpus;

/// How often it is looked whether the accelerators are still being read.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Starts the thread. Host metrics are collected at once and then every `interval`.
///
/// # Errors
/// The thread cannot be started.
pub(crate) fn collect_host_metrics(
    metrics: Arc<Metrics>,
    gpus: Arc<Gpus>,
    interval: Duration,
) -> std::io::Result<()> {
    let work = move || {
        let mut host = told(Host::new(&metrics));
        let mut next = Instant::now();
        loop {
            if let Some(collecting) = &mut host
                && Instant::now() >= next
            {
                if told(collecting.collect()).is_none() {
                    host = None;
                }
                next += interval;
            }
            gpus.look();
            let until = next.saturating_duration_since(Instant::now());
            std::thread::sleep(if until.is_zero() {
                LOOK_EVERY
            } else {
                until.min(LOOK_EVERY)
            });
        }
    };
    // It holds nothing that would have to be given back, so it ends with the process.
    std::thread::Builder::new()
        .name("host-metrics".to_owned())
        .spawn(work)
        .map(drop)
}

fn told<T>(outcome: Result<T, sysinfo::Error>) -> Option<T> {
    outcome
        .inspect_err(|error| tracing::warn!("metrics of the host cannot be collected: {error}"))
        .ok()
}

struct Host {
    system: System,
    cpu: Metric,
    memory_used: Metric,
    memory_available: Metric,
    memory_utilization: Metric,
    disk_usage: Metric,
    disk_available: Metric,
    disk_utilization: Metric,
}

impl Host {
    fn new(metrics: &Metrics) -> Result<Self, sysinfo::Error> {
        let mut system = System::new()?;
        // A utilisation is of a span of time: this is its beginning.
        system.refresh_cpu_usage();
        std::thread::sleep(sysinfo::MINIMUM_CPU_UPDATE_INTERVAL);
        let hostname = hostname();
        let gauge = |what: &'static Builtin| metrics.builtin(what, &["Host", &hostname]);
        Ok(Self {
            system,
            cpu: gauge(&names::CPU_UTILIZATION),
            memory_used: gauge(&names::MEMORY_USED),
            memory_available: gauge(&names::MEMORY_AVAILABLE),
            memory_utilization: gauge(&names::MEMORY_UTILIZATION),
            disk_usage: gauge(&names::DISK_USAGE),
            disk_available: gauge(&names::DISK_AVAILABLE),
            disk_utilization: gauge(&names::DISK_UTILIZATION),
        })
    }

    fn collect(&mut self) -> Result<(), sysinfo::Error> {
        self.system.refresh_cpu_usage();
        self.system.refresh_memory();
        self.cpu.record(f64::from(self.system.global_cpu_usage()));
        let (total, available) = (self.system.total_memory(), self.system.available_memory());
        let used = total.saturating_sub(available);
        self.memory_used.record(scaled(used, 20));
        self.memory_available.record(scaled(available, 20));
        self.memory_utilization.record(share(used, total));
        let disks = Disks::new_with_refreshed_list()?;
        if let Some(root) = disks
            .iter()
            .find(|disk| disk.mount_point() == Path::new("/"))
        {
            let (total, available) = (root.total_space(), root.available_space());
            let used = total.saturating_sub(available);
            self.disk_usage.record(scaled(used, 30));
            self.disk_available.record(scaled(available, 30));
            self.disk_utilization.record(share(used, total));
        }
        Ok(())
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a gauge needs no more than its 53 bits"
)]
fn scaled(bytes: u64, shift: u32) -> f64 {
    bytes as f64 / (1_u64 << shift) as f64
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a gauge needs no more than its 53 bits"
)]
fn share(used: u64, total: u64) -> f64 {
    if total == 0 {
        0.0
    } else {
        (used as f64 * 1000.0 / total as f64).round() / 10.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_percent_with_one_digit() {
        assert!((share(1, 3) - 33.3).abs() < 1e-9);
        assert!(share(1, 0).abs() < 1e-9);
        assert!((scaled(3 << 29, 30) - 1.5).abs() < 1e-9);
    }
}
