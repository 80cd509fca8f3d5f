//! What is recorded of handlers' metrics and what is refused.

use ts_metrics::Mode;

use super::*;

fn metrics(declared: &[(&str, Kind, &[&str])], auto_detect: bool) -> HandlerMetrics {
    let declared = declared
        .iter()
        .map(|(name, kind, dimensions)| DeclaredMetric {
            name: (*name).to_owned(),
            kind: *kind,
            unit: "ms".to_owned(),
            dimensions: dimensions.iter().map(|name| (*name).to_owned()).collect(),
        });
    let config = HandlerMetricsConfig {
        declared: declared.collect(),
        auto_detect,
    };
    HandlerMetrics::new(Metrics::new(Mode::Prometheus, None, false), &config)
}

fn update<'u>(
    name: &'u str,
    kind: Kind,
    value: f64,
    dimensions: &'u [(&'u str, &'u str)],
) -> Update<'u> {
    Update {
        name,
        value,
        unit: "count",
        kind: Some(kind),
        dimensions,
        request_ids: "",
    }
}

fn refusal(metrics: &HandlerMetrics, owner: &Owner, update: &Update<'_>) -> Option<Refused> {
    let mut state = metrics.state.lock();
    metrics.record_one(&mut state, owner, update).err()
}

#[test]
fn a_name_keeps_its_kind_and_the_servers_names_are_its_own() {
    let metrics = metrics(&[], true);
    let owner = Owner::default();
    let labels = [("Label", "x")];
    let gauge = update("a b", Kind::Gauge, 1.0, &labels);
    assert_eq!(refusal(&metrics, &owner, &gauge), None);
    let other = refusal(
        &metrics,
        &owner,
        &update("a_b", Kind::Counter, 1.0, &labels),
    );
    let (known, given) = (Kind::Gauge, Kind::Counter);
    assert_eq!(other, Some(Refused::OtherKind { known, given }));
    for name in ["Requests2XX", "ts_batch_size_sum"] {
        let own = refusal(&metrics, &owner, &update(name, Kind::Counter, 1.0, &labels));
        assert!(matches!(own, Some(Refused::NameTaken(_))), "{own:?}");
    }
}

#[test]
fn a_declared_metric_has_its_labels_in_the_declared_order() {
    let metrics = metrics(&[("T", Kind::Gauge, &["ModelName", "Level"])], false);
    let owner = Owner::default();
    let by_name = [("Level", "Model"), ("ModelName", "m")];
    assert_eq!(
        refusal(&metrics, &owner, &update("T", Kind::Gauge, 1.5, &by_name)),
        None
    );
    let by_place = [("Name", "n"), ("L", "Model")];
    assert_eq!(
        refusal(&metrics, &owner, &update("T", Kind::Gauge, 2.5, &by_place)),
        None
    );
    let page = metrics.metrics.page(&[]);
    let host = hostname();
    for (name, value) in [("m", 1.5), ("n", 2.5)] {
        let line =
            format!("T{{ModelName=\"{name}\",Level=\"Model\",Hostname=\"{host}\",}} {value}\n");
        assert!(page.contains(&line), "{page}");
    }
    assert!(page.contains("gauge metric with unit: ms\n"), "{page}");
    let few = refusal(&metrics, &owner, &update("T", Kind::Gauge, 1.0, &[]));
    assert!(matches!(few, Some(Refused::OtherLabels { given: 0, .. })));
    let unknown = refusal(&metrics, &owner, &update("U", Kind::Gauge, 1.0, &by_name));
    assert_eq!(unknown, Some(Refused::Undeclared));
}

#[test]
fn a_label_with_a_value_per_request_stops_at_the_limit_and_is_counted() {
    let metrics = metrics(&[], true);
    let owner = Owner::default();
    let refused = (0..MAX_SERIES + 100).filter(|number| {
        let number = number.to_string();
        let labels = [("Id", number.as_str())];
        refusal(&metrics, &owner, &update("n", Kind::Counter, 1.0, &labels)).is_some()
    });
    assert_eq!(refused.count(), 100);
    let page = metrics.metrics.page(&["ts_metric_series_dropped_total"]);
    assert!(page.ends_with("{metric=\"n\",} 100.0\n"), "{page}");
}

#[test]
fn series_go_with_the_last_of_their_models_and_come_back_anew() {
    let metrics = metrics(&[], true);
    let (one, other) = (Owner::default(), Owner::default());
    let labels = [("ModelName", "m")];
    for owner in [&one, &other] {
        assert_eq!(
            refusal(&metrics, owner, &update("n", Kind::Counter, 0.5, &labels)),
            None
        );
    }
    metrics.forget(&one);
    assert!(metrics.metrics.page(&["n"]).ends_with(" 1.0\n"));
    metrics.forget(&other);
    assert_eq!(metrics.metrics.page(&["n"]), "");
    // A batch that comes late is nobody's.
    refusal(&metrics, &other, &update("n", Kind::Counter, 0.5, &labels));
    assert_eq!(metrics.metrics.page(&["n"]), "");
    let next = Owner::default();
    let gauge = update("n", Kind::Gauge, 7.0, &labels);
    assert_eq!(refusal(&metrics, &next, &gauge), None);
}

#[test]
fn senseless_values_are_refused() {
    let metrics = metrics(&[], true);
    let owner = Owner::default();
    for value in [f64::NAN, f64::INFINITY, -1.0] {
        let refused = refusal(&metrics, &owner, &update("c", Kind::Counter, value, &[]));
        assert_eq!(refused, Some(Refused::BadValue), "{value}");
    }
    let down = update("g", Kind::Gauge, -1.0, &[]);
    assert_eq!(refusal(&metrics, &owner, &down), None);
    let buckets = [("le", "x")];
    let histogram = update("h", Kind::Histogram, 1.0, &buckets);
    assert_eq!(
        refusal(&metrics, &owner, &histogram),
        Some(Refused::BucketLabel)
    );
}

#[test]
fn printed_metrics_are_read_as_torchserve_reads_them() {
    let whole = "Hits.Count:1.5|#ModelName:m,Level:Model|#type:COUNTER|#hostname:h,1656944816,a,b";
    let printed = Printed::parse(whole).unwrap();
    assert_eq!(
        (printed.name, printed.unit, printed.value),
        ("Hits", "Count", 1.5)
    );
    assert_eq!(printed.kind, Some(Kind::Counter));
    assert_eq!(printed.dimensions, [("ModelName", "m"), ("Level", "Model")]);
    assert_eq!(printed.request_ids, "a,b");
    let short = Printed::parse("Two Words.ms:3e2|#|#hostname:h,1").unwrap();
    assert_eq!((short.value, short.kind), (300.0, None));
    for line in [
        "Hits:1|#|#hostname:h,1",
        "Hits.Count:x|#|#hostname:h,1",
        "Hits.Count:1|#Level|#hostname:h,1",
        "Hits.Count:1|#|#type:SUMMARY|#hostname:h,1",
        "Hits.Count:1",
        "",
    ] {
        assert_eq!(Printed::parse(line), None, "{line}");
    }
    let metrics = metrics(&[("Told", Kind::Gauge, &["A"])], true);
    let (owner, model) = (Owner::default(), ModelName::new("m").unwrap());
    let take = |line: &str| metrics.take_line(&owner, &model, line);
    assert!(take("[METRICS]Told.ms:4|#A:x|#hostname:h,1"));
    assert!(take(&format!("INFO > [METRICS]{whole}")));
    assert!(take("[METRICS]nonsense"));
    assert!(!take("said [METRICS]"));
    assert!(!take("[METRICS]Failed to update metric with name:x"));
    let page = metrics.metrics.page(&["Told", "Hits"]);
    assert!(page.contains("Told{A=\"x\",Hostname="), "{page}");
    assert!(
        page.contains("Hits{ModelName=\"m\",Level=\"Model\","),
        "{page}"
    );
}

proptest::proptest! {
    #[test]
    fn no_line_of_a_handler_does_harm(
        line in r"\PC*",
        (name, unit, value) in (r"[\w\s]{1,8}", r"[\w\s]{1,8}", r"[0-9,.e+-]{1,8}"),
    ) {
        let metrics = metrics(&[], true);
        let (owner, model) = (Owner::default(), ModelName::new("m").unwrap());
        metrics.take_line(&owner, &model, &format!("[METRICS]{line}"));
        let line = format!("[METRICS]{name}.{unit}:{value}|#{line}|#type:GAUGE|#hostname:h,1");
        metrics.take_line(&owner, &model, &line);
        metrics.metrics.page(&[]);
    }
}
