//! Nanoseconds of one thread for what every request pays for being counted and named:
//! `cargo bench --features ts-server/bench --bench telemetry`.
//!
//! Prints a line of JSON with the values of each round.

use std::io::{self, Write as _};
use std::time::Duration;

use ts_server::bench::Telling;
use ts_types::{ModelName, Version};

const ROUNDS: usize = 9;
const REQUESTS: u32 = 100_000;

fn main() -> anyhow::Result<()> {
    let telling = Telling::new(&ModelName::new("m")?, &Version::new("1.0")?);
    let nanos = |time: Duration| time.as_secs_f64() * 1e9 / f64::from(REQUESTS);
    let (mut ids, mut metrics) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let spent = telling.requests(REQUESTS);
        ids.push(nanos(spent.ids));
        metrics.push(nanos(spent.metrics));
    }
    let report = serde_json::json!({"ids_ns": ids, "metrics_ns": metrics});
    writeln!(io::stdout(), "{report}")?;
    Ok(())
}
