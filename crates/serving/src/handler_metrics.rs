//! Metrics that handlers record (*torchserve-contract* 6.6). They come in as events with each
//! batch and live here, so a worker that is replaced loses no counts, and one handler can neither
//! spoil the page for the others nor fill the memory.

use std::collections::HashMap;

use parking_lot::Mutex;
use ts_types::ModelName;
use ts_wire::frame::{MetricEvent, MetricKind};

use crate::metrics::{HandlerSeries, RESERVED_NAMES, hostname};

/// Families of all handlers together, and series in one family. A label that is different in every
/// request would fill any memory.
const MAX_FAMILIES: usize = 500;
const MAX_SERIES: usize = 500;

/// The label that every series ends with.
const HOSTNAME: &str = "Hostname";

/// All families that handlers have made.
pub(crate) struct HandlerMetrics {
    families: Mutex<HashMap<String, Family>>,
    hostname: String,
}

struct Family {
    kind: MetricKind,
    /// Searched from the front: a family has few, and their order is that of their first use.
    series: Vec<(Vec<(String, String)>, HandlerSeries)>,
    /// Refusals are told once.
    told: bool,
}

/// Why an event is not recorded.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Refused {
    #[error("the name is one of the server's own")]
    Reserved,
    #[error("it was a {known:?} before and is a {given:?} now")]
    OtherKind {
        known: MetricKind,
        given: MetricKind,
    },
    #[error("there are {MAX_FAMILIES} metrics of handlers already")]
    TooManyFamilies,
    #[error("it has {MAX_SERIES} combinations of labels already; a label should have few values")]
    TooManySeries,
    #[error("its value is not a number, or is a counter's and negative")]
    BadValue,
}

impl HandlerMetrics {
    pub(crate) fn new() -> Self {
        Self {
            families: Mutex::default(),
            hostname: hostname(),
        }
    }

    /// Records what the handler of `model` recorded during one batch.
    pub(crate) fn record(&self, model: &ModelName, events: &[MetricEvent<'_>]) {
        if events.is_empty() {
            return;
        }
        let mut families = self.families.lock();
        for event in events {
            if let Err((refused, first)) = self.record_one(&mut families, event)
                && first
            {
                tracing::warn!(
                    %model,
                    metric = event.name,
                    "a metric of the handler is not recorded: {refused}"
                );
            }
        }
    }

    /// The flag with a refusal says whether it is the family's first.
    fn record_one(
        &self,
        families: &mut HashMap<String, Family>,
        event: &MetricEvent<'_>,
    ) -> Result<(), (Refused, bool)> {
        let name = page_name(event.name);
        let name = name.as_deref().unwrap_or(event.name);
        if !families.contains_key(name) {
            if families.len() >= MAX_FAMILIES {
                return Err((Refused::TooManyFamilies, false));
            }
            if !RESERVED_NAMES.contains(&name) {
                HandlerSeries::describe(name, event.kind, event.unit);
            }
            families.insert(
                name.to_owned(),
                Family {
                    kind: event.kind,
                    series: Vec::new(),
                    told: false,
                },
            );
        }
        let Some(family) = families.get_mut(name) else {
            return Ok(());
        };
        let result = self.update(family, name, event);
        result.map_err(|refused| (refused, !std::mem::replace(&mut family.told, true)))
    }

    fn update(
        &self,
        family: &mut Family,
        name: &str,
        event: &MetricEvent<'_>,
    ) -> Result<(), Refused> {
        if RESERVED_NAMES.contains(&name) {
            return Err(Refused::Reserved);
        }
        if family.kind != event.kind {
            return Err(Refused::OtherKind {
                known: family.kind,
                given: event.kind,
            });
        }
        let counts = event.kind == MetricKind::Counter;
        if event.value.is_nan() || (counts && (event.value < 0.0 || event.value.is_infinite())) {
            return Err(Refused::BadValue);
        }
        let same = |labels: &[(String, String)]| {
            labels.len() == event.dimensions.len()
                && labels
                    .iter()
                    .zip(&event.dimensions)
                    .all(|((k, v), (key, value))| k == key && v == value)
        };
        if let Some((_, series)) = family.series.iter_mut().find(|(labels, _)| same(labels)) {
            series.update(event.value);
            return Ok(());
        }
        if family.series.len() >= MAX_SERIES {
            return Err(Refused::TooManySeries);
        }
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        let labels: Vec<_> = event.dimensions.iter().map(owned).collect();
        let mut shown: Vec<(String, String)> = Vec::with_capacity(labels.len() + 1);
        for (key, value) in &labels {
            match shown.iter_mut().find(|(earlier, _)| earlier == key) {
                Some((_, earlier)) => earlier.clone_from(value),
                None => shown.push((key.clone(), value.clone())),
            }
        }
        if !shown.iter().any(|(key, _)| key == HOSTNAME) {
            shown.push((HOSTNAME.to_owned(), self.hostname.clone()));
        }
        let mut series = HandlerSeries::new(name, event.kind, &shown);
        series.update(event.value);
        family.series.push((labels, series));
        Ok(())
    }
}

/// The name as Prometheus takes it, where it differs: two spellings of one name are one family.
fn page_name(name: &str) -> Option<String> {
    let fits = |(at, c): (usize, char)| {
        c.is_ascii_alphabetic() || c == '_' || c == ':' || (at > 0 && c.is_ascii_digit())
    };
    if !name.is_empty() && name.char_indices().all(fits) {
        return None;
    }
    let fitting = name
        .char_indices()
        .map(|(at, c)| if fits((at, c)) { c } else { '_' });
    Some(format!(
        "{}{}",
        if name.is_empty() { "_" } else { "" },
        fitting.collect::<String>()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event<'a>(name: &'a str, value: f64, kind: MetricKind, label: &'a str) -> MetricEvent<'a> {
        MetricEvent {
            name,
            value,
            unit: "count",
            kind,
            dimensions: vec![("Label", label)],
        }
    }

    fn refusal(metrics: &HandlerMetrics, event: &MetricEvent<'_>) -> Option<Refused> {
        metrics
            .record_one(&mut metrics.families.lock(), event)
            .err()
            .map(|(refused, _)| refused)
    }

    #[test]
    fn a_name_keeps_its_first_kind_and_the_servers_names_are_its_own() {
        let metrics = HandlerMetrics::new();
        assert_eq!(
            refusal(&metrics, &event("a b", 1.0, MetricKind::Gauge, "x")),
            None
        );
        let other = refusal(&metrics, &event("a_b", 1.0, MetricKind::Counter, "x"));
        let (known, given) = (MetricKind::Gauge, MetricKind::Counter);
        assert_eq!(other, Some(Refused::OtherKind { known, given }));
        let own = refusal(
            &metrics,
            &event("Requests2XX", 1.0, MetricKind::Counter, "x"),
        );
        assert_eq!(own, Some(Refused::Reserved));
    }

    #[test]
    fn a_label_with_a_value_per_request_stops_at_the_limit() {
        let metrics = HandlerMetrics::new();
        let refused = (0..MAX_SERIES + 100).filter(|number| {
            refusal(
                &metrics,
                &event("n", 1.0, MetricKind::Counter, &number.to_string()),
            )
            .is_some()
        });
        assert_eq!(refused.count(), 100);
    }

    #[test]
    fn senseless_values_are_refused() {
        let metrics = HandlerMetrics::new();
        for value in [f64::NAN, f64::INFINITY, -1.0] {
            let refused = refusal(&metrics, &event("c", value, MetricKind::Counter, "x"));
            assert_eq!(refused, Some(Refused::BadValue), "{value}");
        }
        assert_eq!(
            refusal(&metrics, &event("g", -1.0, MetricKind::Gauge, "x")),
            None
        );
    }
}
