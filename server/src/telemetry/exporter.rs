//! The recorder of all metrics, and their text in the form of TorchServe's client library
//! (*torchserve-contract* 6.1).

use std::collections::HashSet;

use actix_web::http::StatusCode;
use metrics::{Counter, Unit, counter, describe_counter};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use ts_serving::hostname;

/// The buckets of every histogram.
const BUCKETS: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
];

/// Gives the metrics as text.
#[derive(Clone)]
pub(crate) struct Exporter(PrometheusHandle);

impl Exporter {
    /// Makes the recorder that all crates of this process record to.
    ///
    /// # Errors
    /// There is a recorder already.
    pub(crate) fn install() -> anyhow::Result<Self> {
        Ok(Self(
            PrometheusBuilder::new()
                .set_buckets(BUCKETS)?
                .install_recorder()?,
        ))
    }

    /// The metrics, or those samples that are named.
    pub(crate) fn text(&self, names: &HashSet<&str>) -> String {
        as_torchserve(&self.0.render(), names)
    }

    /// Folds in what histograms have gathered; without it they grow.
    pub(crate) fn upkeep(&self) {
        self.0.run_upkeep();
    }
}

/// Rewrites the exporter's text: a comma after the last label, values with a decimal point,
/// families in order of their names, and only the samples asked for.
fn as_torchserve(text: &str, names: &HashSet<&str>) -> String {
    // A blank line ends each family.
    let mut families: Vec<&str> = text.split("\n\n").collect();
    families.sort_unstable_by_key(|family| family_name(family));
    let mut result = String::with_capacity(text.len() + text.len() / 16);
    for family in families {
        rewrite_family(family, names, &mut result);
    }
    result
}

fn family_name(family: &str) -> &str {
    family.split(' ').nth(2).unwrap_or_default()
}

fn rewrite_family(text: &str, names: &HashSet<&str>, result: &mut String) {
    let mut heading = String::new();
    for line in text.lines() {
        if line.starts_with('#') {
            heading.push_str(line);
            heading.push('\n');
            continue;
        }
        let Some((series, value)) = line.rsplit_once(' ') else {
            continue;
        };
        let name = series.split('{').next().unwrap_or(series);
        if !names.is_empty() && !names.contains(name) {
            continue;
        }
        result.push_str(&heading);
        heading.clear();
        match series.strip_suffix('}') {
            Some(labelled) => {
                result.push_str(labelled);
                result.push_str(",}");
            }
            None => result.push_str(series),
        }
        result.push(' ');
        result.push_str(value);
        if value
            .bytes()
            .all(|byte| byte.is_ascii_digit() || byte == b'-')
        {
            result.push_str(".0");
        }
        result.push('\n');
    }
}

/// Counts responses by the class of their status.
pub(crate) struct ResponseCounts {
    good: Counter,
    refused: Counter,
    other: Counter,
}

impl ResponseCounts {
    /// Handles for counting; [`Exporter::install`] comes first.
    pub(crate) fn new() -> Self {
        let counter = |name: &'static str| {
            let help = "Torchserve prometheus counter metric with unit: Count";
            describe_counter!(name, Unit::Count, help);
            counter!(name, "Level" => "Host", "Hostname" => hostname())
        };
        Self {
            good: counter("Requests2XX"),
            refused: counter("Requests4XX"),
            other: counter("Requests5XX"),
        }
    }

    /// Counts one response, whatever made it.
    pub(crate) fn count(&self, status: StatusCode) {
        match status.as_u16() {
            200..300 => self.good.increment(1),
            400..500 => self.refused.increment(1),
            _ => self.other.increment(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# TYPE b gauge\nb 3\nb_sum NaN\n\n# HELP a help\n# TYPE a counter\n\
        a{l=\"x}, y\",m=\"1 2\"} 8\na{l=\"z\"} 1.5\n\n";

    #[test]
    fn labels_end_with_a_comma_and_values_have_a_point() {
        let expected = "# HELP a help\n# TYPE a counter\na{l=\"x}, y\",m=\"1 2\",} 8.0\n\
            a{l=\"z\",} 1.5\n# TYPE b gauge\nb 3.0\nb_sum NaN\n";
        assert_eq!(as_torchserve(TEXT, &HashSet::new()), expected);
    }

    #[test]
    fn only_the_samples_asked_for_are_shown() {
        let names = HashSet::from(["b_sum", "none"]);
        assert_eq!(as_torchserve(TEXT, &names), "# TYPE b gauge\nb_sum NaN\n");
    }
}
