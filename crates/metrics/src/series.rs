//! One series: its labels, as page and log show them, and its value.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::registry::Family;

/// Characters that a label's name or value may have; what is longer is cut.
const MAX_LABEL_CHARS: usize = 256;

/// What the values of a family add up to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A sum that never goes down.
    Counter,
    /// The latest value.
    Gauge,
    /// How many values were at most how large.
    Histogram,
}

impl Kind {
    /// As Prometheus and TorchServe write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// The labels of a series, written out once: they are its identity.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Labels {
    /// `name="value",` of each.
    pub(crate) page: String,
    /// `name:value` of all but the host's name, between commas.
    pub(crate) log: String,
}

impl Labels {
    /// Of two of one name the later value counts, at the place of the first. Names become such as
    /// Prometheus takes.
    pub fn new<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut kept: Vec<(String, &str)> = Vec::new();
        for (name, value) in pairs {
            let name = label_name(name);
            match kept.iter_mut().find(|(earlier, _)| *earlier == name) {
                Some((_, earlier)) => *earlier = value,
                None => kept.push((name, value)),
            }
        }
        let (mut page, mut log) = (String::new(), String::new());
        for (name, value) in kept {
            page.push_str(&name);
            page.push_str("=\"");
            // Not by the exporter's function: it lets `\"` and `"` become one, and this text is the
            // series' identity.
            for c in value.chars().take(MAX_LABEL_CHARS) {
                match c {
                    '\\' => page.push_str("\\\\"),
                    '"' => page.push_str("\\\""),
                    '\n' => page.push_str("\\n"),
                    c => page.push(c),
                }
            }
            page.push_str("\",");
            if name.eq_ignore_ascii_case("hostname") {
                continue;
            }
            if !log.is_empty() {
                log.push(',');
            }
            log.push_str(&name);
            log.push(':');
            log.extend(value.chars().take(MAX_LABEL_CHARS).map(|c| match c {
                '|' | ',' => '_',
                c if c.is_control() => '_',
                c => c,
            }));
        }
        Self { page, log }
    }
}

/// A name that Prometheus takes for a label.
fn label_name(name: &str) -> String {
    let mut fitting: String = name
        .chars()
        .take(MAX_LABEL_CHARS)
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .collect();
    if fitting.chars().next().is_none_or(|c| c.is_ascii_digit()) {
        fitting.insert(0, '_');
    }
    fitting
}

/// A number that many threads change.
#[derive(Debug, Default)]
pub(crate) struct Cell(AtomicU64);

impl Cell {
    pub(crate) fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Relaxed))
    }

    pub(crate) fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Ordering::Relaxed);
    }

    pub(crate) fn add(&self, value: f64) {
        self.change(|now| now + value);
    }

    fn change(&self, change: impl Fn(f64) -> f64) {
        let changed = |bits| Some(change(f64::from_bits(bits)).to_bits());
        // The closure always gives a value, so this always succeeds.
        let _before = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, changed);
    }

    pub(crate) fn take(&self) -> f64 {
        f64::from_bits(self.0.swap(0.0_f64.to_bits(), Ordering::Relaxed))
    }
}

/// How many values there were up to each bound. The last count is of those above all bounds.
#[derive(Debug)]
pub(crate) struct Buckets {
    counts: Box<[u64]>,
    sum: f64,
}

#[derive(Debug)]
pub(crate) enum Value {
    /// A counter or a gauge.
    Single(Cell),
    /// A short lock keeps buckets, count and sum in step for the page.
    Histogram(Mutex<Buckets>),
}

#[derive(Debug)]
pub(crate) struct Series {
    pub(crate) labels: Labels,
    pub(crate) value: Value,
    /// Handles; changed under the lock of the family.
    pub(crate) holders: AtomicUsize,
    /// What the log has not been told of, where updates are put together.
    pub(crate) untold: Cell,
    pub(crate) waits_for_log: AtomicBool,
}

impl Series {
    pub(crate) fn new(labels: Labels, kind: Kind, bounds: &[f64]) -> Self {
        let value = match kind {
            Kind::Counter | Kind::Gauge => Value::Single(Cell::default()),
            Kind::Histogram => Value::Histogram(Mutex::new(Buckets {
                counts: vec![0; bounds.len() + 1].into(),
                sum: 0.0,
            })),
        };
        Self {
            labels,
            value,
            holders: AtomicUsize::new(0),
            untold: Cell::default(),
            waits_for_log: AtomicBool::new(false),
        }
    }

    fn update(&self, value: f64, family: &Family) {
        match &self.value {
            Value::Single(cell) if family.kind() == Kind::Counter => cell.add(value),
            Value::Single(cell) => cell.set(value),
            Value::Histogram(buckets) => {
                let at = family.bounds().partition_point(|bound| *bound < value);
                let mut buckets = buckets.lock();
                buckets.counts[at] += 1;
                buckets.sum += value;
            }
        }
    }
}

impl Buckets {
    pub(crate) fn counts(&self) -> &[u64] {
        &self.counts
    }

    pub(crate) fn sum(&self) -> f64 {
        self.sum
    }
}

/// A handle of a series. When its last handle is dropped or retired, a series leaves the page.
#[derive(Debug)]
pub struct Metric {
    series: Arc<Series>,
    family: Arc<Family>,
    retired: AtomicBool,
}

impl Metric {
    pub(crate) fn new(series: Arc<Series>, family: Arc<Family>) -> Self {
        Self {
            series,
            family,
            retired: AtomicBool::new(false),
        }
    }

    /// Adds to a counter, sets a gauge, observes in a histogram.
    pub fn record(&self, value: f64) {
        self.record_for(value, "");
    }

    /// As [`Metric::record`], on behalf of these requests: the log names them.
    pub fn record_for(&self, value: f64, request_ids: &str) {
        self.series.update(value, &self.family);
        if let Some((journal, target)) = self.family.journal() {
            journal.note(&self.family, &self.series, target, value, request_ids);
        }
    }

    /// Adds one to a counter.
    pub fn count(&self) {
        self.record(1.0);
    }

    /// Makes another value of a counter's or a gauge's. No log tells of it.
    pub(crate) fn change(&self, change: impl Fn(f64) -> f64) {
        if let Value::Single(cell) = &self.series.value {
            cell.change(change);
        }
    }

    pub(crate) fn kind(&self) -> Kind {
        self.family.kind()
    }

    /// Lets go of the series before the handle is dropped.
    pub fn retire(&self) {
        if !self.retired.swap(true, Ordering::AcqRel) {
            self.family.release(&self.series);
        }
    }
}

impl Drop for Metric {
    fn drop(&mut self) {
        self.retire();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped_and_fit_their_places() {
        let labels = Labels::new([
            ("a b", "x\"\\\n模型"),
            ("9", "p|q,r\n"),
            ("Hostname", "h"),
            ("a_b", "later"),
        ]);
        assert_eq!(labels.page, "a_b=\"later\",_9=\"p|q,r\\n\",Hostname=\"h\",");
        assert_eq!(labels.log, "a_b:later,_9:p_q_r_");
        let escaped = Labels::new([("m", "x\"\\\n模型")]);
        assert_eq!(escaped.page, "m=\"x\\\"\\\\\\n模型\",");
        let long = "x".repeat(10_000);
        assert_eq!(Labels::new([("m", long.as_str())]).page.len(), 256 + 5);
    }
}
