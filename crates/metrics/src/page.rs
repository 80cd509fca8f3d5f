//! The page: Prometheus' text format 0.0.4, as TorchServe's client library writes it
//! (*torchserve-contract* 6.1). Families in order of their names, series in order of their labels.

use metrics_exporter_prometheus::formatting::{write_help_line, write_type_line};

use crate::number;
use crate::registry::{Family, Metrics};
use crate::series::{Kind, Series, Value};

impl Metrics {
    /// The page, or those of its samples that are named, by their own name or their family's.
    pub fn page(&self, names: &[&str]) -> String {
        let mut page = String::with_capacity(64 << 10);
        for family in self.families.read().values() {
            family.write(&mut page, names);
        }
        page
    }
}

impl Family {
    fn write(&self, page: &mut String, names: &[&str]) {
        let wanted = |sample: &str| {
            names.is_empty() || names.contains(&self.name()) || names.contains(&sample)
        };
        let endings: &[&'static str] = match self.kind() {
            Kind::Counter | Kind::Gauge => &[""],
            Kind::Histogram => &["_bucket", "_sum", "_count"],
        };
        let endings: Vec<&'static str> = endings
            .iter()
            .copied()
            .filter(|ending| wanted(&format!("{}{ending}", self.name())))
            .collect();
        let all = self.series.lock();
        if endings.is_empty() || all.is_empty() {
            return;
        }
        let name = self.name();
        write_help_line(page, name, None, None, self.help());
        write_type_line(page, name, None, None, self.kind().as_str());
        for series in all.values() {
            self.write_series(page, series, &endings);
        }
    }

    fn write_series(&self, page: &mut String, series: &Series, endings: &[&str]) {
        let buckets = match &series.value {
            Value::Single(cell) => return self.sample(page, "", series, None, cell.get()),
            Value::Histogram(buckets) => buckets.lock(),
        };
        let counts = buckets.counts();
        if endings.contains(&"_bucket") {
            let mut sum = 0;
            let bounds = self.bounds().iter().copied().chain([f64::INFINITY]);
            for (bound, count) in bounds.zip(counts) {
                sum += count;
                self.sample(page, "_bucket", series, Some(bound), as_f64(sum));
            }
        }
        if endings.contains(&"_sum") {
            self.sample(page, "_sum", series, None, buckets.sum());
        }
        if endings.contains(&"_count") {
            let count = as_f64(counts.iter().sum());
            self.sample(page, "_count", series, None, count);
        }
    }

    fn sample(
        &self,
        page: &mut String,
        ending: &str,
        series: &Series,
        bound: Option<f64>,
        value: f64,
    ) {
        page.push_str(self.name());
        page.push_str(ending);
        let labels = &series.labels.page;
        if !labels.is_empty() || bound.is_some() {
            page.push('{');
            page.push_str(labels);
            if let Some(bound) = bound {
                page.push_str("le=\"");
                number::push(page, bound);
                page.push_str("\",");
            }
            page.push('}');
        }
        page.push(' ');
        number::push(page, value);
        page.push('\n');
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "the format's numbers have 53 bits"
)]
fn as_f64(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use crate::{Kind, Labels, Metrics, Mode};

    #[test]
    fn a_page_is_in_order_and_can_be_filtered() {
        let metrics = Metrics::new(Mode::Prometheus, None, false);
        let histogram = metrics.family("Depth", Kind::Histogram, "count").unwrap();
        let counter = metrics.family("Alpha", Kind::Counter, "a\\b").unwrap();
        let (x, y) = (
            counter.series(Labels::new([("M", "y")])),
            counter.series(Labels::new([("M", "x")])),
        );
        x.record(0.5);
        x.record(0.25);
        y.count();
        let depth = histogram.series(Labels::new([]));
        depth.record(0.005);
        depth.record(0.3);
        depth.record(11.0);
        let page = metrics.page(&[]);
        let start = "# HELP Alpha Torchserve prometheus counter metric with unit: a\\\\b\n\
                     # TYPE Alpha counter\nAlpha{M=\"x\",} 1.0\nAlpha{M=\"y\",} 0.75\n\
                     # HELP Depth Torchserve prometheus histogram metric with unit: count\n\
                     # TYPE Depth histogram\nDepth_bucket{le=\"0.005\",} 1.0\n";
        assert!(page.starts_with(start), "{page}");
        let end = "Depth_bucket{le=\"10.0\",} 2.0\nDepth_bucket{le=\"+Inf\",} 3.0\n\
                   Depth_sum 11.305\nDepth_count 3.0\n";
        assert!(page.ends_with(end), "{page}");
        let some = metrics.page(&["Depth_sum", "Alpha", "none"]);
        let samples: Vec<&str> = some.lines().filter(|line| !line.starts_with('#')).collect();
        let expected = [
            "Alpha{M=\"x\",} 1.0",
            "Alpha{M=\"y\",} 0.75",
            "Depth_sum 11.305",
        ];
        assert_eq!(samples, expected);
        assert_eq!(metrics.page(&["none"]), "");
    }
}
