//! Metrics of the host, on a thread of their own (*torchserve-contract* 6.3).

use std::path::Path;
use std::time::{Duration, Instant};

use metrics::{Gauge, Unit, describe_gauge, gauge};
use sysinfo::{Disks, System};

use super::Exporter;
use ts_serving::hostname;

/// How often the exporter is looked after.
const UPKEEP: Duration = Duration::from_secs(5);

/// Starts the thread. Host metrics are collected at once and then every `interval`, if at all.
///
/// # Errors
/// The thread cannot be started.
pub(crate) fn collect_host_metrics(
    exporter: Exporter,
    interval: Option<Duration>,
) -> std::io::Result<()> {
    let work = move || {
        let mut host = interval.and_then(|_| told(Host::new()));
        let mut next = Instant::now();
        loop {
            if let (Some(collecting), Some(interval)) = (&mut host, interval)
                && Instant::now() >= next
            {
                if told(collecting.collect()).is_none() {
                    host = None;
                }
                next += interval;
            }
            exporter.upkeep();
            let until = next.saturating_duration_since(Instant::now());
            std::thread::sleep(if until.is_zero() {
                UPKEEP
            } else {
                until.min(UPKEEP)
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
    cpu: Gauge,
    memory_used: Gauge,
    memory_available: Gauge,
    memory_utilization: Gauge,
    disk_usage: Gauge,
    disk_available: Gauge,
    disk_utilization: Gauge,
}

impl Host {
    fn new() -> Result<Self, sysinfo::Error> {
        let gauge = |name: &'static str, unit: Unit, word: &str| {
            let help = format!("Torchserve prometheus gauge metric with unit: {word}");
            describe_gauge!(name, unit, help);
            gauge!(name, "Level" => "Host", "Hostname" => hostname())
        };
        let mut system = System::new()?;
        // A utilisation is of a span of time: this is its beginning.
        system.refresh_cpu_usage();
        std::thread::sleep(sysinfo::MINIMUM_CPU_UPDATE_INTERVAL);
        Ok(Self {
            system,
            cpu: gauge("CPUUtilization", Unit::Percent, "Percent"),
            memory_used: gauge("MemoryUsed", Unit::Mebibytes, "Megabytes"),
            memory_available: gauge("MemoryAvailable", Unit::Mebibytes, "Megabytes"),
            memory_utilization: gauge("MemoryUtilization", Unit::Percent, "Percent"),
            disk_usage: gauge("DiskUsage", Unit::Gibibytes, "Gigabytes"),
            disk_available: gauge("DiskAvailable", Unit::Gibibytes, "Gigabytes"),
            disk_utilization: gauge("DiskUtilization", Unit::Percent, "Percent"),
        })
    }

    fn collect(&mut self) -> Result<(), sysinfo::Error> {
        self.system.refresh_cpu_usage();
        self.system.refresh_memory();
        self.cpu.set(f64::from(self.system.global_cpu_usage()));
        let (total, available) = (self.system.total_memory(), self.system.available_memory());
        let used = total.saturating_sub(available);
        self.memory_used.set(scaled(used, 20));
        self.memory_available.set(scaled(available, 20));
        self.memory_utilization.set(share(used, total));
        let disks = Disks::new_with_refreshed_list()?;
        if let Some(root) = disks
            .iter()
            .find(|disk| disk.mount_point() == Path::new("/"))
        {
            let (total, available) = (root.total_space(), root.available_space());
            let used = total.saturating_sub(available);
            self.disk_usage.set(scaled(used, 30));
            self.disk_available.set(scaled(available, 30));
            self.disk_utilization.set(share(used, total));
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
