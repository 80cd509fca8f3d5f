//! Figures of the accelerators, from NVIDIA's management library where there is one.
//!
//! It is somebody else's code, opened at run time: whatever it does, it does in a thread of its own.
//! Everybody else reads the last figures.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use parking_lot::Mutex;
use ts_metrics::{Metric, Metrics, hostname, names};

/// A library that takes longer for one round is told of.
const SLOW: Duration = Duration::from_secs(10);

/// Figures that are older than so many rounds are not shown any more.
const STALE_ROUNDS: u32 = 3;

/// What one accelerator does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Reading {
    /// Share of the last second or so in which it worked, in percent.
    utilization: u32,
    used_bytes: u64,
    total_bytes: u64,
}

impl Reading {
    /// As TorchServe's describe-model tells it.
    fn tell(&self, id: u32) -> String {
        let Self {
            utilization,
            used_bytes,
            ..
        } = self;
        format!(
            "gpuId::{id} utilization.gpu::{utilization} % utilization.memory::{:.0} % \
             memory.used::{} MiB",
            self.memory_percent(),
            used_bytes >> 20
        )
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "a share needs no more than its 53 bits"
    )]
    fn memory_percent(&self) -> f64 {
        if self.total_bytes == 0 {
            return 0.0;
        }
        self.used_bytes as f64 * 100.0 / self.total_bytes as f64
    }

    /// A library that tells nonsense is not believed.
    fn is_sane(&self) -> bool {
        self.utilization <= 100 && self.used_bytes <= self.total_bytes
    }
}

/// Where figures come from.
pub(crate) trait Source: Send {
    /// What the accelerator of this id does now.
    ///
    /// # Errors
    /// Why it cannot be told.
    fn read(&self, id: u32) -> Result<Reading, String>;
}

/// The figures of all accelerators.
#[derive(Debug, Default)]
pub(crate) struct Gpus {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    readings: HashMap<u32, (Reading, Instant)>,
    /// How long figures are good for.
    kept: Duration,
    /// Since when the library has been busy, if it is.
    busy: Option<Instant>,
    told: bool,
}

impl Gpus {
    /// Starts collecting in a thread of its own. `open` finds the source; it may take its time.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn collect(
        self: &Arc<Self>,
        ids: Vec<u32>,
        interval: Duration,
        metrics: Arc<Metrics>,
        open: impl FnOnce() -> Result<Box<dyn Source>, String> + Send + 'static,
    ) -> std::io::Result<()> {
        {
            let mut state = self.state.lock();
            state.kept = interval.saturating_mul(STALE_ROUNDS);
            state.busy = Some(Instant::now());
        }
        let gpus = Arc::clone(self);
        let work = move || {
            let source = match open() {
                Ok(source) => source,
                Err(reason) => {
                    gpus.state.lock().busy = None;
                    return gpus.tell_once(&reason);
                }
            };
            let mut shown = HashMap::new();
            loop {
                gpus.state.lock().busy = Some(Instant::now());
                for id in &ids {
                    gpus.read_one(&*source, *id, &metrics, &mut shown);
                }
                gpus.state.lock().busy = None;
                std::thread::sleep(interval);
            }
        };
        // It holds nothing that would have to be given back, so it ends with the process.
        std::thread::Builder::new()
            .name("gpu-metrics".to_owned())
            .spawn(work)
            .map(drop)
    }

    fn read_one(
        &self,
        source: &dyn Source,
        id: u32,
        metrics: &Metrics,
        shown: &mut HashMap<u32, Shown>,
    ) {
        let reading = source.read(id).and_then(|reading| {
            if reading.is_sane() {
                Ok(reading)
            } else {
                Err(format!("it tells {reading:?}, which cannot be"))
            }
        });
        match reading {
            Ok(reading) => {
                let shown = shown.entry(id).or_insert_with(|| Shown::new(metrics, id));
                shown.record(&reading);
                let readings = &mut self.state.lock().readings;
                readings.insert(id, (reading, Instant::now()));
            }
            Err(reason) => {
                shown.remove(&id);
                self.state.lock().readings.remove(&id);
                self.tell_once(&format!("GPU {id}: {reason}"));
            }
        }
    }

    fn tell_once(&self, reason: &str) {
        if !std::mem::replace(&mut self.state.lock().told, true) {
            tracing::warn!("no figures of the GPUs, or not of all: {reason}");
        }
    }

    /// Tells, once, of a library that does not come back.
    pub(crate) fn look(&self) {
        let busy = self.state.lock().busy;
        if busy.is_some_and(|since| since.elapsed() > SLOW) {
            self.tell_once("NVIDIA's management library does not answer");
        }
    }

    /// What describe-model tells of an accelerator.
    pub(crate) fn tell(&self, id: u32) -> String {
        match self.reading(id) {
            Some(reading) => reading.tell(id),
            None => format!("gpuId::{id}"),
        }
    }

    /// The last figures of an accelerator, if they are not too old.
    fn reading(&self, id: u32) -> Option<Reading> {
        let state = self.state.lock();
        let (reading, read) = state.readings.get(&id)?;
        (read.elapsed() <= state.kept + SLOW).then_some(*reading)
    }
}

/// One accelerator's series.
struct Shown {
    utilization: Metric,
    memory_utilization: Metric,
    memory_used: Metric,
}

impl Shown {
    fn new(metrics: &Metrics, id: u32) -> Self {
        let (id, hostname) = (id.to_string(), hostname());
        let labels = ["Host", id.as_str(), hostname.as_str()];
        Self {
            utilization: metrics.builtin(&names::GPU_UTILIZATION, &labels),
            memory_utilization: metrics.builtin(&names::GPU_MEMORY_UTILIZATION, &labels),
            memory_used: metrics.builtin(&names::GPU_MEMORY_USED, &labels),
        }
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "a gauge needs no more than its 53 bits"
    )]
    fn record(&self, reading: &Reading) {
        self.utilization.record(f64::from(reading.utilization));
        self.memory_utilization.record(reading.memory_percent());
        let mebibytes = reading.used_bytes as f64 / f64::from(1 << 20);
        self.memory_used.record(mebibytes);
    }
}

/// NVIDIA's management library. It counts all devices of the machine; workers see some of them.
pub(crate) struct Library {
    nvml: Nvml,
    /// The value of `CUDA_VISIBLE_DEVICES`.
    visible: Option<String>,
}

impl Library {
    /// Opens the library of this machine.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub(crate) fn open(visible: Option<String>) -> Result<Box<dyn Source>, String> {
        let nvml = Nvml::init().map_err(|error| error.to_string())?;
        Ok(Box::new(Self { nvml, visible }))
    }

    fn device(&self, id: u32) -> Result<nvml_wrapper::Device<'_>, NvmlError> {
        let item = self.visible.as_deref().and_then(|visible| {
            let mut items = visible.split(',').map(str::trim);
            items.nth(usize::try_from(id).ok()?)
        });
        match item {
            Some(uuid) if uuid.starts_with("GPU-") => self.nvml.device_by_uuid(uuid),
            Some(index) => self.nvml.device_by_index(index.parse().unwrap_or(id)),
            None => self.nvml.device_by_index(id),
        }
    }
}

impl Source for Library {
    fn read(&self, id: u32) -> Result<Reading, String> {
        let read = || {
            let device = self.device(id)?;
            let memory = device.memory_info()?;
            Ok(Reading {
                utilization: device.utilization_rates()?.gpu,
                used_bytes: memory.used,
                total_bytes: memory.total,
            })
        };
        read().map_err(|error: NvmlError| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use ts_metrics::Mode;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    /// Sixteen accelerators, the fourth of which tells nonsense and the fifth nothing.
    struct Fake(mpsc::Sender<u32>);

    impl Source for Fake {
        fn read(&self, id: u32) -> Result<Reading, String> {
            let _test_is_over = self.0.send(id);
            match id {
                3 => Ok(Reading {
                    utilization: 4_000_000,
                    used_bytes: 2,
                    total_bytes: 1,
                }),
                4 => Err("lost".to_owned()),
                _ => Ok(Reading {
                    utilization: id,
                    used_bytes: 3 << 20,
                    total_bytes: 4 << 20,
                }),
            }
        }
    }

    #[test]
    fn sane_figures_are_shown_and_others_are_not_mt_11() {
        let (gpus, metrics) = (
            Arc::new(Gpus::default()),
            Metrics::new(Mode::Prometheus, None, false),
        );
        let (sender, read) = mpsc::channel();
        let open = move || Ok(Box::new(Fake(sender)) as Box<dyn Source>);
        let ids = (0..9).collect();
        let shared = Arc::clone(&metrics);
        gpus.collect(ids, Duration::from_millis(10), shared, open)
            .unwrap();
        // The second round begins when the first is done.
        while read.recv_timeout(LIMIT).unwrap() != 8 {}
        assert_eq!(read.recv_timeout(LIMIT), Ok(0));
        let told = gpus.reading(8).unwrap().tell(8);
        assert_eq!(
            told,
            "gpuId::8 utilization.gpu::8 % utilization.memory::75 % memory.used::3 MiB"
        );
        assert_eq!((gpus.reading(3), gpus.reading(4)), (None, None));
        let page = metrics.page(&["GPUUtilization"]);
        let host = hostname();
        let line =
            format!("GPUUtilization{{Level=\"Host\",DeviceId=\"8\",Hostname=\"{host}\",}} 8.0\n");
        assert!(page.contains(&line), "{page}");
        assert_eq!(page.lines().count(), 2 + 7, "{page}");
    }

    #[test]
    fn a_library_that_hangs_keeps_nobody_waiting_mt_11() {
        let (gpus, metrics) = (
            Arc::new(Gpus::default()),
            Metrics::new(Mode::Prometheus, None, false),
        );
        let (_held, never) = mpsc::channel::<()>();
        let open = move || Err(format!("{:?}", never.recv()));
        let shared = Arc::clone(&metrics);
        gpus.collect(vec![0], Duration::from_millis(10), shared, open)
            .unwrap();
        let asked = Instant::now();
        gpus.look();
        assert_eq!(
            (gpus.reading(0), metrics.page(&["GPUUtilization"])),
            (None, String::new())
        );
        assert!(asked.elapsed() < Duration::from_secs(5));
        assert!(!gpus.state.lock().told, "it has its time");
    }
}
