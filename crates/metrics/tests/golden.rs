//! Names, types, units and labels of the server's metrics, as its page and its log write them.
//! Dashboards are built on them: a change shows here (MT-03). Run with `UPDATE_REFERENCE=1` to write
//! the golden file and the tables of docs/metrics.md anew.

#![expect(clippy::unwrap_used, reason = "a test stops where it fails")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use ts_metrics::{Builtin, Group, Kind, Metrics, Mode, hostname, names};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn updating() -> bool {
    std::env::var_os("UPDATE_REFERENCE").is_some()
}

/// Every metric once, with its labels' names as their values: the page, and what the log has.
fn recorded() -> (String, Vec<String>) {
    #[derive(Clone, Default)]
    struct Seen(Arc<Mutex<Vec<u8>>>);
    impl std::io::Write for Seen {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let seen = Seen::default();
    let writer = seen.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .without_time()
        .with_writer(move || writer.clone())
        .finish();
    let metrics = Metrics::new(Mode::Log, None, true);
    let held: Vec<_> = names::ALL
        .iter()
        .map(|one| metrics.builtin(one, one.labels))
        .collect();
    tracing::subscriber::with_default(subscriber, || {
        for metric in &held {
            metric.record(1.0);
        }
        metrics.journal().close();
        metrics.journal().write();
    });
    let text = String::from_utf8(seen.0.lock().clone()).unwrap();
    let lines = text.lines().map(|line| {
        let line = line.trim().replace(&hostname(), "<host>");
        line[..line.rfind("timestamp:").unwrap()].to_owned() + "timestamp:<s>"
    });
    (metrics.page(&[]), lines.collect())
}

#[test]
fn no_metric_changes_in_silence_mt_03() {
    let (page, lines) = recorded();
    let text = format!("{page}\n{}\n", lines.join("\n"));
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden.txt");
    if updating() {
        return fs_err::write(&file, text).unwrap();
    }
    assert_eq!(text, include_str!("golden.txt"));
}

fn tables() -> String {
    let mut text = String::new();
    for (title, group, log) in [
        ("TorchServe's", Group::TorchServe, "yes"),
        ("This server's own", Group::Own, "no"),
        ("Triton's, with `triton_metrics=true`", Group::Triton, "no"),
    ] {
        let _infallible = write!(
            text,
            "### {title}\n\nIn the log: {log}.\n\n| name | type | unit | labels | what it says |\n\
             |---|---|---|---|---|\n"
        );
        let of_group = |one: &&&Builtin| one.group == group;
        for one in names::ALL.iter().filter(of_group) {
            let labels = one.labels.iter().map(|label| format!("`{label}`"));
            let _infallible = writeln!(
                text,
                "| `{}` | {} | {} | {} | {} |",
                one.name,
                one.kind.as_str(),
                one.unit,
                labels.collect::<Vec<_>>().join(", "),
                one.about
            );
        }
        text.push('\n');
    }
    text
}

#[test]
fn the_documentation_has_every_metric() {
    let path = root().join("docs/metrics.md");
    let (start, end) = ("<!-- tables -->\n", "<!-- end of tables -->\n");
    let page = fs_err::read_to_string(&path).unwrap();
    let from = page.find(start).unwrap() + start.len();
    let to = page.find(end).unwrap();
    if updating() {
        let updated = format!("{}\n{}{}", &page[..from], tables(), &page[to..]);
        return fs_err::write(&path, updated).unwrap();
    }
    assert_eq!(page[from..to].trim(), tables().trim());
}

#[test]
fn names_are_unique_and_counters_have_no_bounds() {
    for (at, one) in names::ALL.iter().enumerate() {
        assert!(names::ALL[..at].iter().all(|other| other.name != one.name));
        assert_eq!(one.kind == Kind::Histogram, !one.bounds.is_empty());
        assert!(one.bounds.is_sorted());
    }
}
