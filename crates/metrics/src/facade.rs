//! For what records through the facade of the crate `metrics`: counts of the whole process, and
//! libraries. Nobody tells a facade that a series is over, so these stay as long as the process, and
//! their number is bounded. What stands for a model or a worker holds a [`Metric`] instead.

use std::collections::HashMap;
use std::sync::Arc;

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};
use metrics_exporter_prometheus::formatting::sanitize_metric_name;
use parking_lot::Mutex;

use crate::names;
use crate::registry::{Family, Metrics};
use crate::series::{Kind, Labels, Metric};

/// Series that the facade may make. A label with a value for every request would fill the memory.
const MAX_SERIES: usize = 1000;

/// Records what comes by the facade.
#[derive(Debug)]
pub struct Facade {
    metrics: Arc<Metrics>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Unit and meaning by name, where somebody told them.
    described: HashMap<String, (&'static str, SharedString)>,
    families: HashMap<String, Arc<Family>>,
    series: HashMap<Key, Arc<Metric>>,
    is_full: bool,
}

/// The facade has a recorder, and keeps the first.
#[derive(Debug, thiserror::Error)]
#[error("this process records its metrics elsewhere already")]
pub struct InstalledElsewhere;

impl Metrics {
    /// Has the macros of the facade record here, for the whole process.
    ///
    /// # Errors
    /// They record elsewhere already.
    pub fn install(self: &Arc<Self>) -> Result<(), InstalledElsewhere> {
        metrics::set_global_recorder(Facade::new(Arc::clone(self))).map_err(|_| InstalledElsewhere)
    }
}

impl Facade {
    /// Records to these.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            metrics,
            state: Mutex::default(),
        }
    }

    fn describe(&self, name: &KeyName, unit: Option<Unit>, text: SharedString) {
        let unit = unit.map_or("", |unit| unit.as_str());
        let mut state = self.state.lock();
        if state.described.len() < MAX_SERIES {
            let name = sanitize_metric_name(name.as_str());
            state.described.insert(name, (unit, text));
        }
    }

    /// The series of this key; none where its name is another kind's, or there are too many.
    fn series(&self, key: &Key, kind: Kind) -> Option<Arc<Metric>> {
        let mut state = self.state.lock();
        if let Some(known) = state.series.get(key) {
            return (known.kind() == kind).then(|| Arc::clone(known));
        }
        if state.series.len() >= MAX_SERIES {
            if !std::mem::replace(&mut state.is_full, true) {
                let name = key.name();
                tracing::warn!(
                    "`{name}` and what comes after it is not shown: the process has {MAX_SERIES} \
                     series that end with it only"
                );
            }
            return None;
        }
        let made = Arc::new(self.make(&mut state, key, kind)?);
        state.series.insert(key.clone(), Arc::clone(&made));
        Some(made)
    }

    fn make(&self, state: &mut State, key: &Key, kind: Kind) -> Option<Metric> {
        let builtin = names::ALL.iter().find(|one| one.name == key.name());
        if let Some(builtin) = builtin.filter(|one| one.kind == kind) {
            let value_of = |name: &&str| {
                let label = key.labels().find(|label| label.key() == *name);
                label.map_or("", |label| label.value())
            };
            let values: Vec<&str> = builtin.labels.iter().map(value_of).collect();
            return Some(self.metrics.builtin(builtin, &values));
        }
        let name = sanitize_metric_name(key.name());
        let family = match state.families.get(&name) {
            Some(family) => Arc::clone(family),
            None => {
                let (unit, about) = state.described.get(&name).cloned().unwrap_or_default();
                let made = self.metrics.plain_family(&name, kind, unit, &about);
                let family = made
                    .inspect_err(|taken| tracing::warn!("a metric is not shown: {taken}"))
                    .ok()?;
                state.families.insert(name, Arc::clone(&family));
                family
            }
        };
        let labels = key.labels().map(|label| (label.key(), label.value()));
        (family.kind() == kind).then(|| family.series(Labels::new(labels)))
    }
}

impl Recorder for Facade {
    fn describe_counter(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        self.describe(&key, unit, description);
    }

    fn describe_gauge(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        self.describe(&key, unit, description);
    }

    fn describe_histogram(&self, key: KeyName, unit: Option<Unit>, description: SharedString) {
        self.describe(&key, unit, description);
    }

    fn register_counter(&self, key: &Key, _metadata: &Metadata<'_>) -> Counter {
        self.series(key, Kind::Counter)
            .map_or_else(Counter::noop, Counter::from_arc)
    }

    fn register_gauge(&self, key: &Key, _metadata: &Metadata<'_>) -> Gauge {
        self.series(key, Kind::Gauge)
            .map_or_else(Gauge::noop, Gauge::from_arc)
    }

    fn register_histogram(&self, key: &Key, _metadata: &Metadata<'_>) -> Histogram {
        self.series(key, Kind::Histogram)
            .map_or_else(Histogram::noop, Histogram::from_arc)
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "the format's numbers have 53 bits"
)]
impl CounterFn for Metric {
    fn increment(&self, value: u64) {
        self.record(value as f64);
    }

    fn absolute(&self, value: u64) {
        self.change(|now| now.max(value as f64));
    }
}

impl GaugeFn for Metric {
    fn increment(&self, value: f64) {
        self.change(|now| now + value);
    }

    fn decrement(&self, value: f64) {
        self.change(|now| now - value);
    }

    fn set(&self, value: f64) {
        self.record(value);
    }
}

impl HistogramFn for Metric {
    fn record(&self, value: f64) {
        Self::record(self, value);
    }
}

#[cfg(test)]
mod tests {
    use metrics::{counter, describe_gauge, gauge, histogram, with_local_recorder};

    use super::*;
    use crate::registry::Mode;

    #[test]
    fn what_the_macros_record_is_on_the_page_with_all_else() {
        let metrics = Metrics::new(Mode::Log, None, false);
        let facade = Facade::new(Arc::clone(&metrics));
        with_local_recorder(&facade, || {
            counter!("ts_token_refusals_total", "Reason" => "missing").increment(2);
            describe_gauge!("odd name", Unit::Bytes, "what\nit says");
            gauge!("odd name").set(5.0);
            gauge!("odd name").decrement(1.5);
            gauge!("odd name", "l" => "x\"y").increment(1.0);
            counter!("seen").absolute(7);
            counter!("seen").absolute(6);
            histogram!("took").record(0.3);
            // The name is another kind's; another one's sample; a built-in of another kind.
            gauge!("seen").set(1.0);
            counter!("took_sum").increment(1);
            gauge!("ts_token_refusals_total").set(1.0);
        });
        let page = metrics.page(&[]);
        for line in [
            "# HELP odd_name what\\nit says\n# TYPE odd_name gauge\nodd_name 3.5\n",
            "odd_name{l=\"x\\\"y\",} 1.0\n",
            "seen 7.0\n",
            "took_sum 0.3\ntook_count 1.0\n",
            "# TYPE ts_token_refusals_total counter\n\
             ts_token_refusals_total{Reason=\"missing\",} 2.0\n",
        ] {
            assert!(page.contains(line), "{line}\n{page}");
        }
        assert_eq!(page.matches("# TYPE").count(), 4, "{page}");
    }

    #[test]
    fn a_label_with_ever_new_values_does_not_fill_the_memory() {
        let metrics = Metrics::new(Mode::Prometheus, None, false);
        let facade = Facade::new(Arc::clone(&metrics));
        with_local_recorder(&facade, || {
            for id in 0..2 * MAX_SERIES {
                counter!("requests", "id" => id.to_string()).increment(1);
            }
        });
        assert_eq!(metrics.page(&[]).lines().count(), 2 + MAX_SERIES);
    }
}
