//! The fuzz targets, in one program: `FUZZ_TARGET` names the one that it is. Each feeds bytes to a
//! parser and asserts more than that it returns: limits hold, what was read can be written and read
//! again.
//!
//! `run.py` builds and runs them; docs/testing.md tells of it.

#![no_main]
#![expect(
    clippy::disallowed_methods,
    reason = "the macro has a file of its own to write, and this is where the environment is read"
)]

mod archives;
mod bodies;
mod models;
mod parameters;
mod settings;

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

/// Panics where the input shows a fault.
type Target = fn(&[u8]);

const TARGETS: &[(&str, Target)] = &[
    ("multipart", bodies::multipart),
    ("form", bodies::form),
    ("query", parameters::query),
    ("registration", parameters::registration),
    ("properties", settings::properties),
    ("settings", settings::settings),
    ("models", settings::models),
    ("address", settings::address),
    ("manifest", models::manifest),
    ("model_config", models::config),
    ("archive_zip", archives::zip),
    ("archive_tar", archives::tar),
];

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let asked = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let found = TARGETS.iter().find(|(name, _)| *name == asked);
    found.map_or_else(
        || panic!("FUZZ_TARGET=`{asked}` is no target"),
        |(_, it)| *it,
    )
});

fuzz_target!(|data: &[u8]| TARGET(data));
