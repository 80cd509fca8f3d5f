//! `metrics.yaml` (*torchserve-contract* 6.4): which of TorchServe's metrics there are, with which
//! labels, and which metrics of handlers are declared.
//!
//! It is read as plain data. A file that cannot be used declares nothing, and is told with its line;
//! it ends neither the server nor a worker.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;
use serde_saphyr::Spanned;
use ts_metrics::{Group, Kind, names};
use ts_serving::DeclaredMetric;

/// The largest file that is read.
const MAX_BYTES: u64 = 1 << 20;

/// What a file declares.
#[derive(Debug, Default)]
pub(crate) struct Declared {
    /// Built-in metrics with the names of their labels; `None` is all, as they are.
    pub(crate) server: Option<HashMap<String, Vec<String>>>,
    /// Metrics of handlers.
    pub(crate) handlers: Vec<DeclaredMetric>,
    /// What is wrong with it.
    pub(crate) faults: Vec<String>,
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    ts_metrics: Option<Kinds>,
    #[serde(default)]
    model_metrics: Option<Kinds>,
}

#[derive(Default, Deserialize)]
struct Kinds {
    #[serde(default)]
    counter: Option<Vec<Entry>>,
    #[serde(default)]
    gauge: Option<Vec<Entry>>,
    #[serde(default)]
    histogram: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
struct Entry {
    name: Spanned<String>,
    unit: Spanned<String>,
    #[serde(default)]
    dimensions: Option<Vec<String>>,
}

impl Kinds {
    fn each(self) -> impl Iterator<Item = (Kind, Entry)> {
        let kinds = [
            (Kind::Counter, self.counter),
            (Kind::Gauge, self.gauge),
            (Kind::Histogram, self.histogram),
        ];
        kinds.into_iter().flat_map(|(kind, entries)| {
            entries
                .unwrap_or_default()
                .into_iter()
                .map(move |entry| (kind, entry))
        })
    }
}

impl Declared {
    /// TorchServe's own file: everything the server has, and the two metrics of every handler.
    pub(crate) fn by_default() -> Self {
        let handlers = names::HANDLER_DEFAULTS.iter();
        let declared = handlers.map(|(name, unit)| DeclaredMetric {
            name: (*name).to_owned(),
            kind: Kind::Gauge,
            unit: (*unit).to_owned(),
            dimensions: ["ModelName", "Level"].map(str::to_owned).to_vec(),
        });
        Self {
            server: None,
            handlers: declared.collect(),
            faults: Vec::new(),
        }
    }

    /// What the file declares. One that is not there is as none, with a fault.
    pub(crate) fn read(path: &Path) -> Self {
        let shown = path.display();
        let length = fs_err::metadata(path).map(|found| found.len());
        let text = match length {
            Ok(length) if length > MAX_BYTES => {
                return Self::unusable(&format!("`{shown}` is larger than 1 MiB"));
            }
            Ok(_) => fs_err::read_to_string(path),
            Err(error) => Err(error),
        };
        match text {
            Ok(text) => Self::parse(&text, path),
            Err(error) => Self {
                faults: vec![format!(
                    "`metrics_config` cannot be read, so the default metrics are kept: {error}"
                )],
                ..Self::by_default()
            },
        }
    }

    fn unusable(fault: &str) -> Self {
        Self {
            server: Some(HashMap::new()),
            handlers: Vec::new(),
            faults: vec![format!(
                "{fault}. `metrics_config` is not loaded: none of TorchServe's metrics is kept"
            )],
        }
    }

    fn parse(text: &str, path: &Path) -> Self {
        let options = serde_saphyr::options! {
            budget: serde_saphyr::budget! {
                max_documents: 1,
                max_nodes: 100_000,
                max_anchors: 1_000,
                max_aliases: 10_000,
            },
            alias_limits: serde_saphyr::alias_limits! {
                max_total_replayed_events: 20_000,
                max_replay_stack_depth: 32,
            },
            duplicate_keys: serde_saphyr::options::DuplicateKeyPolicy::Error,
            reject_unsupported_tags: true,
            with_snippet: false,
        };
        let at = |line: Option<u64>| match line {
            Some(line) => format!("`{}`, line {line}", path.display()),
            None => format!("`{}`", path.display()),
        };
        let file: Option<File> = match serde_saphyr::from_str_with_options(text, options) {
            Ok(file) => file,
            Err(error) => {
                let error = error.without_snippet();
                let place = at(error.location().map(|at| at.line()));
                return Self::unusable(&format!("{place}: {error}"));
            }
        };
        let Some(file) = file else {
            return Self::unusable(&format!("{} is empty", at(None)));
        };
        let mut declared = Self {
            server: Some(HashMap::new()),
            ..Self::default()
        };
        let server: Vec<_> = file.ts_metrics.unwrap_or_default().each().collect();
        let handlers: Vec<_> = file.model_metrics.unwrap_or_default().each().collect();
        for (_, entry) in server.iter().chain(&handlers) {
            for (what, text) in [("name", &entry.name), ("unit", &entry.unit)] {
                if text.value.trim().is_empty() {
                    let place = at(Some(text.defined.line()));
                    return Self::unusable(&format!("{place}: the {what} of a metric is empty"));
                }
            }
        }
        for (kind, entry) in server {
            let place = at(Some(entry.name.defined.line()));
            if let Err(reason) = declared.add_builtin(kind, entry) {
                declared.faults.push(format!("{place}: {reason}"));
            }
        }
        declared.handlers = handlers
            .into_iter()
            .map(|(kind, entry)| DeclaredMetric {
                name: entry.name.value,
                kind,
                unit: entry.unit.value,
                dimensions: entry.dimensions.unwrap_or_default(),
            })
            .collect();
        declared
    }

    fn add_builtin(&mut self, kind: Kind, entry: Entry) -> Result<(), String> {
        let name = entry.name.value;
        let of_torchserve = |one: &&&names::Builtin| one.group == Group::TorchServe;
        let Some(known) = names::ALL
            .iter()
            .filter(of_torchserve)
            .find(|one| one.name == name)
        else {
            return Err(format!("`ts_metrics` has no metric `{name}`"));
        };
        let dimensions = entry.dimensions.unwrap_or_default();
        if known.kind != kind {
            let (is, said) = (known.kind.as_str(), kind.as_str());
            return Err(format!("`{name}` is a {is} and no {said}; it is left out"));
        }
        if dimensions.len() != known.labels.len() {
            let labels = known.labels.join(", ");
            return Err(format!(
                "`{name}` has the dimensions {labels}, and {} are named; it is left out",
                dimensions.len()
            ));
        }
        self.server.get_or_insert_default().insert(name, dimensions);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Declared {
        Declared::parse(text, Path::new("metrics.yaml"))
    }

    const SMALL: &str = "
dimensions:
  - &model_name \"ModelName\"
  - &level \"Level\"
  - &host \"Hostname\"
ts_metrics:
  counter:
    - name: Requests2XX
      unit: Count
      dimensions: [*level, *host]
  gauge:
model_metrics:
  counter:
    - name: Hits
      unit: widgets
      dimensions: [*model_name]
  histogram:
    - {name: Depth, unit: ms}
";

    #[test]
    fn a_file_says_which_metrics_there_are() {
        let declared = parse(SMALL);
        assert_eq!(declared.faults, Vec::<String>::new());
        let server = declared.server.unwrap();
        assert_eq!(server["Requests2XX"], ["Level", "Hostname"]);
        assert_eq!(server.len(), 1);
        let [hits, depth] = &declared.handlers[..] else {
            panic!("{:?}", declared.handlers)
        };
        assert_eq!((hits.name.as_str(), hits.kind), ("Hits", Kind::Counter));
        assert_eq!(
            (hits.unit.as_str(), &hits.dimensions[..]),
            ("widgets", &["ModelName".to_owned()][..])
        );
        assert_eq!((depth.kind, depth.dimensions.len()), (Kind::Histogram, 0));
    }

    #[test]
    fn what_is_wrong_is_told_with_file_and_line() {
        for (text, line, reason) in [
            (
                SMALL.replace("Hits", "''"),
                14,
                "the name of a metric is empty",
            ),
            (
                SMALL.replace("widgets", "' '"),
                15,
                "the unit of a metric is empty",
            ),
            (SMALL.replace("[*level, *host]", "[*none]"), 10, ""),
            (
                SMALL.replace("- name: Hits\n      unit", "- unit"),
                15,
                "name",
            ),
            (SMALL.replace("widgets", "[1]"), 15, ""),
            ("a: [".to_owned(), 1, ""),
        ] {
            let declared = parse(&text);
            let fault = &declared.faults[0];
            assert!(
                fault.contains(&format!("`metrics.yaml`, line {line}")),
                "{fault}"
            );
            assert!(fault.contains(reason), "{fault}");
            assert!(declared.server.unwrap().is_empty());
            assert!(declared.handlers.is_empty());
        }
        // These cost a metric each and not the file.
        for (from, to) in [
            ("Requests2XX", "Requests9XX"),
            ("[*level, *host]", "[*level]"),
            (
                "  counter:\n    - name: Requests2XX",
                "  histogram:\n    - name: Requests2XX",
            ),
        ] {
            let declared = parse(&SMALL.replacen(from, to, 1));
            assert!(
                declared.faults[0].starts_with("`metrics.yaml`, line 8: "),
                "{:?}",
                declared.faults
            );
            assert_eq!(declared.handlers.len(), 2);
        }
        assert!(parse("").faults[0].contains("is empty"));
    }

    #[test]
    fn a_file_that_is_not_there_leaves_the_default_ones() {
        let declared = Declared::read(Path::new("/nowhere/metrics.yaml"));
        assert!(declared.faults[0].contains("/nowhere/metrics.yaml"));
        assert!(declared.server.is_none());
        assert_eq!(declared.handlers.len(), 2);
    }
}
