//! Metrics that handlers record (*torchserve-contract* 6.6), or print as TorchServe's workers do
//! (6.5). They come in as events with each batch and live here, so a worker that is replaced loses no
//! counts, and one handler can neither spoil the page for the others nor fill the memory.

use std::collections::{HashMap, HashSet};
use std::mem::Discriminant;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;
use regex::Regex;
use ts_metrics::{Family, Kind, Labels, Metric, Metrics, NameTaken, hostname, names};
use ts_types::ModelName;
use ts_wire::frame::{MetricDeclaration, MetricEvent, MetricKind};

use crate::pool::PoolSpec;

/// Families of all handlers together, and series in one family. A label that is different in every
/// request would fill any memory.
const MAX_FAMILIES: usize = 500;
const MAX_SERIES: usize = 500;

/// Different refusals that are told.
const MAX_TOLD: usize = 1000;

/// Bytes of a metric's name, and of its unit.
const MAX_NAME_BYTES: usize = 256;

/// The label that every series ends with.
const HOSTNAME: &str = "Hostname";

/// How a printed metric begins.
const MARK: &str = "[METRICS]";

/// What the operator declared of the metrics of handlers.
#[derive(Debug, Clone)]
pub struct HandlerMetricsConfig {
    /// Those under `model_metrics`.
    pub declared: Vec<DeclaredMetric>,
    /// Whether others are recorded too.
    pub auto_detect: bool,
}

impl HandlerMetricsConfig {
    /// What handlers are told of it.
    pub(crate) fn for_handlers(&self) -> Vec<MetricDeclaration> {
        let declared = self.declared.iter().map(|metric| MetricDeclaration {
            name: metric.name.clone(),
            kind: match metric.kind {
                Kind::Counter => MetricKind::Counter,
                Kind::Gauge => MetricKind::Gauge,
                Kind::Histogram => MetricKind::Histogram,
            },
            unit: metric.unit.clone(),
            dimensions: metric.dimensions.clone(),
        });
        declared.collect()
    }
}

/// A declared metric of handlers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeclaredMetric {
    /// Its name.
    pub name: String,
    /// What its values add up to.
    pub kind: Kind,
    /// Its unit.
    pub unit: String,
    /// Names of its labels but the host's.
    pub dimensions: Vec<String>,
}

/// Whose a series is: one model version's from its registration to its end.
#[derive(Debug)]
pub(crate) struct Owner {
    id: u64,
    gone: AtomicBool,
}

impl Default for Owner {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            gone: AtomicBool::new(false),
        }
    }
}

/// All families that handlers have made.
pub(crate) struct HandlerMetrics {
    metrics: Arc<Metrics>,
    declared: HashMap<String, DeclaredMetric>,
    auto_detect: bool,
    state: Mutex<State>,
    hostname: String,
}

#[derive(Default)]
struct State {
    families: HashMap<String, HandlerFamily>,
    /// Refusals are told once.
    told: HashSet<(String, Discriminant<Refused>)>,
}

struct HandlerFamily {
    family: Arc<Family>,
    series: HashMap<Labels, Owned>,
    /// Updates that found no room.
    dropped: Option<Metric>,
}

/// A series and whose it is; it goes with the last of them.
struct Owned {
    metric: Metric,
    owners: Vec<u64>,
}

/// Why an event is not recorded.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Refused {
    #[error("{0}, which is not a handler's to have")]
    NameTaken(#[from] NameTaken),
    #[error(
        "`model_metrics` of `metrics_config` does not declare it; declare it there, or set \
         `model_metrics_auto_detect=true`"
    )]
    Undeclared,
    #[error("it is a {} and was recorded as a {}", known.as_str(), given.as_str())]
    OtherKind { known: Kind, given: Kind },
    #[error("it was declared with the labels {declared:?} and recorded with {given}")]
    OtherLabels { declared: Vec<String>, given: usize },
    #[error("a histogram cannot have a label `le`")]
    BucketLabel,
    #[error("there are {MAX_FAMILIES} metrics of handlers already")]
    TooManyFamilies,
    #[error("it has {MAX_SERIES} combinations of labels already; a label should have few values")]
    TooManySeries,
    #[error("its value is not a number, or is a counter's and negative")]
    BadValue,
    #[error("its name or its unit has more than {MAX_NAME_BYTES} bytes")]
    LongName,
    #[error("its line does not say its type, and no configuration does")]
    NoKind,
}

/// An event, recorded or printed.
struct Update<'e> {
    name: &'e str,
    value: f64,
    unit: &'e str,
    kind: Option<Kind>,
    dimensions: &'e [(&'e str, &'e str)],
    request_ids: &'e str,
}

impl HandlerMetrics {
    pub(crate) fn new(metrics: Arc<Metrics>, config: &HandlerMetricsConfig) -> Self {
        let declared = config.declared.iter();
        let declared = declared.map(|metric| (page_name(&metric.name), metric.clone()));
        Self {
            metrics,
            declared: declared.collect(),
            auto_detect: config.auto_detect,
            state: Mutex::default(),
            hostname: hostname(),
        }
    }

    /// Records what the handler of `model` recorded during one batch.
    pub(crate) fn record(&self, owner: &Owner, model: &ModelName, events: &[MetricEvent<'_>]) {
        for event in events {
            let kind = match event.kind {
                MetricKind::Counter => Kind::Counter,
                MetricKind::Gauge => Kind::Gauge,
                MetricKind::Histogram => Kind::Histogram,
            };
            let update = Update {
                name: event.name,
                value: event.value,
                unit: event.unit,
                kind: Some(kind),
                dimensions: &event.dimensions,
                request_ids: event.request_ids,
            };
            self.record_or_tell(owner, model, &update);
        }
    }

    fn record_or_tell(&self, owner: &Owner, model: &ModelName, update: &Update<'_>) {
        let mut state = self.state.lock();
        if let Err(refused) = self.record_one(&mut state, owner, update) {
            let end = update.name.floor_char_boundary(MAX_NAME_BYTES);
            let name = update.name[..end].to_owned();
            let told = (name, std::mem::discriminant(&refused));
            if state.told.len() < MAX_TOLD && state.told.insert(told) {
                drop(state);
                let metric = &update.name[..end];
                tracing::warn!(
                    %model,
                    metric,
                    "a metric of the handler is not recorded: {refused}"
                );
            }
        }
    }

    fn record_one(
        &self,
        state: &mut State,
        owner: &Owner,
        update: &Update<'_>,
    ) -> Result<(), Refused> {
        // Looked at under the lock, so that nothing comes after `forget`.
        if owner.gone.load(Ordering::SeqCst) {
            return Ok(());
        }
        if update.name.len() > MAX_NAME_BYTES || update.unit.len() > MAX_NAME_BYTES {
            return Err(Refused::LongName);
        }
        let name = page_name(update.name);
        let declared = self.declared.get(&name);
        if declared.is_none() && !self.auto_detect {
            return Err(Refused::Undeclared);
        }
        let living = state.families.get(&name).map(|known| known.family.kind());
        let known = declared.map(|metric| metric.kind).or(living);
        let kind = match (known, update.kind) {
            (Some(known), Some(given)) if known != given => {
                return Err(Refused::OtherKind { known, given });
            }
            (Some(kind), _) | (None, Some(kind)) => kind,
            (None, None) => return Err(Refused::NoKind),
        };
        let counts = kind == Kind::Counter;
        if update.value.is_nan() || (counts && (update.value < 0.0 || update.value.is_infinite())) {
            return Err(Refused::BadValue);
        }
        let labels = self.labels(declared, update.dimensions)?;
        if kind == Kind::Histogram && update.dimensions.iter().any(|(name, _)| *name == "le") {
            return Err(Refused::BucketLabel);
        }
        let full = state.families.len() >= MAX_FAMILIES;
        let family = match state.families.get_mut(&name) {
            Some(family) => family,
            None if full => return Err(Refused::TooManyFamilies),
            None => {
                let unit = declared.map_or(update.unit, |metric| &metric.unit);
                let family = HandlerFamily {
                    family: self.metrics.family(&name, kind, unit)?,
                    series: HashMap::new(),
                    dropped: None,
                };
                state.families.entry(name).or_insert(family)
            }
        };
        if !family.series.contains_key(&labels) && family.series.len() >= MAX_SERIES {
            let name = family.family.name();
            let dropped = || self.metrics.builtin(&names::SERIES_DROPPED, &[name]);
            family.dropped.get_or_insert_with(dropped).count();
            return Err(Refused::TooManySeries);
        }
        let of_family = &family.family;
        let owned = family
            .series
            .entry(labels)
            .or_insert_with_key(|labels| Owned {
                metric: of_family.series(labels.clone()),
                owners: Vec::new(),
            });
        if !owned.owners.contains(&owner.id) {
            owned.owners.push(owner.id);
        }
        owned.metric.record_for(update.value, update.request_ids);
        Ok(())
    }

    /// Declared names by name where all are given, else by place, as TorchServe takes them; names
    /// as they come where nobody declared any.
    fn labels(
        &self,
        declared: Option<&DeclaredMetric>,
        given: &[(&str, &str)],
    ) -> Result<Labels, Refused> {
        let mut pairs: Vec<(&str, &str)> = given.to_vec();
        if let Some(declared) = declared.map(|metric| &metric.dimensions) {
            if declared.len() != given.len() {
                return Err(Refused::OtherLabels {
                    declared: declared.clone(),
                    given: given.len(),
                });
            }
            let named = |name: &String| given.iter().find(|(given, _)| given == name).copied();
            let by_name: Option<Vec<_>> = declared.iter().map(named).collect();
            pairs = by_name.unwrap_or_else(|| {
                let values = given.iter().map(|(_, value)| *value);
                declared.iter().map(String::as_str).zip(values).collect()
            });
        }
        if !pairs.iter().any(|(name, _)| *name == HOSTNAME) {
            pairs.push((HOSTNAME, &self.hostname));
        }
        Ok(Labels::new(pairs))
    }

    /// A model version has ended: its series go, and nothing more is recorded for it.
    pub(crate) fn forget(&self, owner: &Owner) {
        if owner.gone.swap(true, Ordering::SeqCst) {
            return;
        }
        self.state.lock().families.retain(|_, family| {
            family.series.retain(|_, owned| {
                owned.owners.retain(|id| *id != owner.id);
                !owned.owners.is_empty()
            });
            let lives = !family.series.is_empty();
            if !lives {
                self.metrics.remove(&family.family);
            }
            lives
        });
    }

    /// Takes a line that a handler printed, if it is a metric's. One that cannot be read as such
    /// is told.
    fn take_line(&self, owner: &Owner, model: &ModelName, line: &str) -> bool {
        let Some(text) = line
            .strip_prefix("INFO > ")
            .unwrap_or(line)
            .strip_prefix(MARK)
        else {
            return false;
        };
        // What the cache of metrics itself says of an update that it refuses.
        if text.starts_with("Failed to update metric") {
            return false;
        }
        match Printed::parse(text) {
            Some(printed) => {
                let update = Update {
                    name: printed.name,
                    value: printed.value,
                    unit: printed.unit,
                    kind: printed.kind,
                    dimensions: &printed.dimensions,
                    request_ids: printed.request_ids,
                };
                self.record_or_tell(owner, model, &update);
            }
            None => tracing::error!(%model, "Failed to parse metrics line: \"{text}\"."),
        }
        true
    }
}

/// Where the lines that a host prints may be metrics.
#[derive(Debug, Clone, Default)]
pub(crate) struct PrintedMetrics(pub(crate) Weak<PoolSpec>);

impl PrintedMetrics {
    /// Whether the line was a metric; it belongs into no model log then.
    pub(crate) fn take(&self, line: &str) -> bool {
        if !line.contains(MARK) {
            return false;
        }
        self.0.upgrade().is_some_and(|spec| {
            let (owner, model) = (&spec.metrics.owner, &spec.model);
            let handlers = &spec.surroundings.handler_metrics;
            handlers.take_line(owner, model, line)
        })
    }
}

/// `<Name>.<Unit>:<value>|#<dims>[|#type:<type>]|#hostname:<h>,<epoch s>[,<request ids>]`.
#[derive(Debug, PartialEq)]
struct Printed<'l> {
    name: &'l str,
    unit: &'l str,
    value: f64,
    kind: Option<Kind>,
    dimensions: Vec<(&'l str, &'l str)>,
    request_ids: &'l str,
}

impl<'l> Printed<'l> {
    fn parse(line: &'l str) -> Option<Self> {
        static FORM: LazyLock<Option<Regex>> = LazyLock::new(|| {
            let form = r"^([\w\s]+)\.([\w\s]+):([0-9\-,.e+]+)\|#([^|]*)(?:\|#type:([^|,]+))?\|#hostname:([^,]+),([^,]+)(?:,(.*))?$";
            Regex::new(form).ok()
        });
        let found = FORM.as_ref()?.captures(line)?;
        let part = |at| found.get(at).map_or("", |part| part.as_str());
        let kind = match part(5).trim().to_ascii_lowercase().as_str() {
            "" => None,
            "counter" => Some(Kind::Counter),
            "gauge" => Some(Kind::Gauge),
            "histogram" => Some(Kind::Histogram),
            _ => return None,
        };
        let dimensions = part(4).split(',').filter(|pair| !pair.is_empty());
        Some(Self {
            name: part(1),
            unit: part(2),
            value: part(3).replace(',', "").parse().ok()?,
            kind,
            dimensions: dimensions
                .map(|pair| pair.split_once(':'))
                .collect::<Option<_>>()?,
            request_ids: part(8),
        })
    }
}

/// The name as Prometheus takes it: two spellings of one name are one family.
fn page_name(name: &str) -> String {
    let fits = |(at, c): (usize, char)| {
        c.is_ascii_alphabetic() || c == '_' || c == ':' || (at > 0 && c.is_ascii_digit())
    };
    if name.is_empty() {
        return "_".to_owned();
    }
    let chars = name.char_indices();
    chars
        .map(|(at, c)| if fits((at, c)) { c } else { '_' })
        .collect()
}

#[cfg(test)]
mod tests;
