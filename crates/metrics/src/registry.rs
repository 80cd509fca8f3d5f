//! All families of a process.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::{Mutex, RwLock};

use crate::journal::{Journal, LogTarget};
use crate::names::{Builtin, Group};
use crate::series::{Kind, Labels, Metric, Series};

/// What is written to the log of metrics, beside the page that has them all
/// (*torchserve-contract* 6.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Everything.
    Log,
    /// Nothing.
    Prometheus,
    /// Everything but the three counters of requests.
    Legacy,
}

impl Mode {
    /// In the order of the reference page.
    pub const NAMES: &[&str] = &["log", "prometheus", "legacy"];

    /// The mode of this name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "log" => Some(Self::Log),
            "prometheus" => Some(Self::Prometheus),
            "legacy" => Some(Self::Legacy),
            _ => None,
        }
    }
}

/// A family's name that another one's samples have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{name}` is the name of a sample of `{family}`")]
pub struct NameTaken {
    /// The name that was asked for.
    pub name: String,
    /// Whose it is.
    pub family: String,
}

/// The families of this process.
#[derive(Debug)]
pub struct Metrics {
    pub(crate) families: RwLock<BTreeMap<String, Arc<Family>>>,
    /// Which built-in metrics of TorchServe there are, with their labels; `None` is all.
    declared: Option<HashMap<String, Vec<String>>>,
    mode: Mode,
    journal: Arc<Journal>,
    triton: bool,
}

/// All series of one name.
#[derive(Debug)]
pub struct Family {
    name: String,
    kind: Kind,
    unit: String,
    help: String,
    bounds: Box<[f64]>,
    journal: Option<(Arc<Journal>, LogTarget)>,
    pub(crate) series: Mutex<BTreeMap<Labels, Arc<Series>>>,
}

impl Metrics {
    /// No series yet. `declared` are the built-in metrics of TorchServe that are wanted, with the
    /// names of their labels; `None` wants all.
    pub fn new(
        mode: Mode,
        declared: Option<HashMap<String, Vec<String>>>,
        triton: bool,
    ) -> Arc<Self> {
        Arc::new(Self {
            families: RwLock::default(),
            declared,
            mode,
            journal: Arc::default(),
            triton,
        })
    }

    /// Whether the names that Triton has are wanted too.
    pub fn for_triton(&self) -> bool {
        self.triton
    }

    /// What gathers the lines for the log; somebody has to write them.
    pub fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    /// A new series of a built-in metric, with a value for each label in the order of its table.
    /// One that is not wanted is on no page and in no log.
    pub fn builtin(&self, what: &'static Builtin, values: &[&str]) -> Metric {
        debug_assert_eq!(what.labels.len(), values.len(), "labels of {}", what.name);
        let own = what.labels.iter().copied().zip(values.iter().copied());
        let wanted = match what.group {
            Group::TorchServe => match &self.declared {
                None => Some(Labels::new(own)),
                Some(declared) => declared.get(what.name).map(|names| {
                    // By name where the name is known, else by place.
                    Labels::new(names.iter().enumerate().map(|(at, name)| {
                        let known = what.labels.iter().position(|label| label == name);
                        let value = values.get(known.unwrap_or(at)).copied();
                        (name.as_str(), value.unwrap_or_default())
                    }))
                }),
            },
            Group::Triton => self.triton.then(|| Labels::new(own)),
            Group::Own => Some(Labels::new(own)),
        };
        let family = self.builtin_family(what, wanted.is_some());
        family.series(wanted.unwrap_or_else(|| Labels::new([])))
    }

    fn builtin_family(&self, what: &'static Builtin, wanted: bool) -> Arc<Family> {
        let target = (what.group == Group::TorchServe).then_some(LogTarget::Server);
        let make = || {
            let help = match what.group {
                Group::TorchServe => help_of(what.kind, what.unit),
                Group::Own | Group::Triton => what.about.to_owned(),
            };
            let logged = wanted
                && match self.mode {
                    Mode::Log => true,
                    Mode::Prometheus => false,
                    Mode::Legacy => !what.is_legacy(),
                };
            let journal = target.filter(|_| logged);
            Arc::new(Family {
                name: what.name.to_owned(),
                kind: what.kind,
                unit: what.unit.to_owned(),
                help,
                bounds: what.bounds.into(),
                journal: journal.map(|target| (Arc::clone(&self.journal), target)),
                series: Mutex::default(),
            })
        };
        if !wanted {
            return make();
        }
        let mut families = self.families.write();
        let known = families.entry(what.name.to_owned()).or_insert_with(make);
        Arc::clone(known)
    }

    /// A new family for what a handler records.
    ///
    /// # Errors
    /// One of its samples would have another one's name.
    pub fn family(&self, name: &str, kind: Kind, unit: &str) -> Result<Arc<Family>, NameTaken> {
        let logged = self.mode != Mode::Prometheus;
        let journal = logged.then(|| (Arc::clone(&self.journal), LogTarget::Model));
        self.add(name, kind, unit, help_of(kind, unit), journal)
    }

    /// A new family that no log tells of.
    ///
    /// # Errors
    /// As for [`Metrics::family`].
    pub(crate) fn plain_family(
        &self,
        name: &str,
        kind: Kind,
        unit: &str,
        about: &str,
    ) -> Result<Arc<Family>, NameTaken> {
        self.add(name, kind, unit, about.to_owned(), None)
    }

    fn add(
        &self,
        name: &str,
        kind: Kind,
        unit: &str,
        help: String,
        journal: Option<(Arc<Journal>, LogTarget)>,
    ) -> Result<Arc<Family>, NameTaken> {
        let mut families = self.families.write();
        let builtins = crate::names::ALL.iter().map(|one| (one.name, one.kind));
        let living = families.values().map(|one| (one.name.as_str(), one.kind));
        for (other, other_kind) in living.chain(builtins) {
            let clash = sample_names(other, other_kind)
                .any(|sample| sample_names(name, kind).any(|own| own == sample));
            if clash {
                return Err(NameTaken {
                    name: name.to_owned(),
                    family: other.to_owned(),
                });
            }
        }
        let family = Arc::new(Family {
            name: name.to_owned(),
            kind,
            unit: unit.to_owned(),
            help,
            bounds: crate::names::HANDLER_BOUNDS.into(),
            journal,
            series: Mutex::default(),
        });
        families.insert(name.to_owned(), Arc::clone(&family));
        Ok(family)
    }

    /// Takes a family from the page with all its series.
    pub fn remove(&self, family: &Arc<Family>) {
        let mut families = self.families.write();
        if families
            .get(&family.name)
            .is_some_and(|known| Arc::ptr_eq(known, family))
        {
            families.remove(&family.name);
        }
    }
}

/// TorchServe's help text.
fn help_of(kind: Kind, unit: &str) -> String {
    let kind = kind.as_str();
    format!("Torchserve prometheus {kind} metric with unit: {unit}")
}

/// The names that the samples of a family have, and its own.
fn sample_names(name: &str, kind: Kind) -> impl Iterator<Item = String> {
    let endings: &[&str] = match kind {
        Kind::Counter | Kind::Gauge => &[""],
        Kind::Histogram => &["", "_bucket", "_sum", "_count"],
    };
    endings.iter().map(move |ending| format!("{name}{ending}"))
}

impl Family {
    /// Its name on the page.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What its values add up to.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The unit of its values.
    pub fn unit(&self) -> &str {
        &self.unit
    }

    pub(crate) fn help(&self) -> &str {
        &self.help
    }

    pub(crate) fn bounds(&self) -> &[f64] {
        &self.bounds
    }

    pub(crate) fn journal(&self) -> Option<(&Journal, LogTarget)> {
        self.journal
            .as_ref()
            .map(|(journal, target)| (&**journal, *target))
    }

    /// A handle of the series with these labels, which is a new one unless others hold it.
    pub fn series(self: &Arc<Self>, labels: Labels) -> Metric {
        let mut all = self.series.lock();
        let series = all.entry(labels).or_insert_with_key(|labels| {
            Arc::new(Series::new(labels.clone(), self.kind, &self.bounds))
        });
        series.holders.fetch_add(1, Ordering::Relaxed);
        Metric::new(Arc::clone(series), Arc::clone(self))
    }

    /// One holder less; the last takes the series with it.
    pub(crate) fn release(&self, series: &Arc<Series>) {
        let mut all = self.series.lock();
        if series.holders.fetch_sub(1, Ordering::Relaxed) == 1 {
            all.remove(&series.labels);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names;

    #[test]
    fn a_series_goes_with_its_last_holder_and_the_next_starts_anew() {
        let metrics = Metrics::new(Mode::Prometheus, None, false);
        let labels = ["m", "default", "h"];
        let of_one = metrics.builtin(&names::REQUESTS, &labels);
        let of_other = metrics.builtin(&names::REQUESTS, &labels);
        of_one.count();
        of_other.count();
        of_one.retire();
        of_one.count();
        of_one.retire();
        drop(of_one);
        assert!(metrics.page(&[]).contains("hostname=\"h\",} 3.0\n"));
        drop(of_other);
        assert_eq!(metrics.page(&[]), "");
        let next = metrics.builtin(&names::REQUESTS, &labels);
        assert!(metrics.page(&[]).contains("hostname=\"h\",} 0.0\n"));
        drop(next);
    }

    #[test]
    fn sample_names_are_unique() {
        let metrics = Metrics::new(Mode::Prometheus, None, false);
        metrics.family("a", Kind::Histogram, "count").unwrap();
        for (name, kind) in [
            ("a", Kind::Counter),
            ("a_sum", Kind::Counter),
            ("Requests2XX", Kind::Counter),
            ("ts_request_duration_seconds_count", Kind::Gauge),
        ] {
            assert!(metrics.family(name, kind, "").is_err(), "{name}");
        }
        metrics.family("b_count", Kind::Counter, "").unwrap();
        assert!(metrics.family("b", Kind::Histogram, "").is_err());
    }

    #[test]
    fn what_is_not_declared_is_not_shown_and_labels_follow_the_declaration() {
        let labels = ["hostname", "model_name"].map(str::to_owned).to_vec();
        let declared = HashMap::from([("ts_inference_requests_total".to_owned(), labels)]);
        let metrics = Metrics::new(Mode::Log, Some(declared), false);
        let (shown, hidden) = (
            metrics.builtin(&names::REQUESTS, &["m", "1.0", "h"]),
            metrics.builtin(&names::QUEUE_TIME, &["Host", "h"]),
        );
        shown.count();
        hidden.record(3.0);
        let page = metrics.page(&[]);
        assert!(
            page.ends_with("ts_inference_requests_total{hostname=\"h\",model_name=\"m\",} 1.0\n"),
            "{page}"
        );
        assert!(!page.contains("QueueTime"), "{page}");
    }
}
