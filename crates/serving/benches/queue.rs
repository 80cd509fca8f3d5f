//! Requests per second through the queue and back on one core:
//! `cargo bench --features ts-serving/bench --bench queue`.
//!
//! Prints a line of JSON: for each kind of load, the requests per second of each round.

use std::io::{self, Write as _};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use ts_serving::bench::{Load, pass};
use ts_types::ModelName;

const ROUNDS: usize = 5;
const REQUESTS: usize = 100_000;

/// Batch sizes and callers. A lone caller and the worker switch threads for every request.
const LOADS: [(usize, usize); 3] = [(1, 1), (1, 64), (32, 64)];

fn main() -> io::Result<()> {
    stay_on_one_core()?;
    let model = ModelName::new("m").map_err(io::Error::other)?;
    let mut speeds = LOADS.map(|_| Vec::with_capacity(ROUNDS));
    for _ in 0..ROUNDS {
        for ((batch_size, callers), speeds) in LOADS.into_iter().zip(&mut speeds) {
            let load = Load {
                batch_size,
                callers,
                each: REQUESTS / callers,
            };
            let took = pass(&model, load)?;
            speeds.push((load.callers * load.each) as f64 / took.as_secs_f64());
        }
    }
    let report = LOADS.into_iter().zip(speeds);
    let report: Vec<_> = report
        .map(|((batch_size, callers), speeds)| {
            serde_json::json!({
                "batch_size": batch_size, "callers": callers, "per_second": speeds,
            })
        })
        .collect();
    writeln!(io::stdout(), "{}", serde_json::Value::from(report))
}

/// This thread and those that it starts.
fn stay_on_one_core() -> io::Result<()> {
    let allowed = sched_getaffinity(None)?;
    let mut one = CpuSet::new();
    // The first one has most of the machine's interrupts.
    if let Some(core) = (0..CpuSet::MAX_CPU)
        .rev()
        .find(|core| allowed.is_set(*core))
    {
        one.set(core);
    }
    Ok(sched_setaffinity(None, &one)?)
}
