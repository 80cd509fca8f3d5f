//! How many heaps the C library makes. Its allocator gives threads heaps of their own, up to eight
//! for each core, and keeps in each what the busiest moment left there in pieces: over five minutes
//! in which models and workers came and went, the server grew from 34 to 40 MiB; with as many heaps as
//! there are cores, where threads wait for each other no more, it stayed as it was.
//!
//! The library reads this from the environment at the start of a process only, so the process
//! replaces itself once. It stays the same process to whoever started it; model hosts inherit it.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use crate::settings::Environment;

const VARIABLE: &str = "MALLOC_ARENA_MAX";

/// Another way to say it, and much else.
const TUNABLES: &str = "GLIBC_TUNABLES";

/// Replaces this process by one with so many heaps; comes back where that is settled already, by
/// this or by the operator, or cannot be done.
pub(crate) fn settle(environment: &Environment) {
    let settled = [VARIABLE, TUNABLES]
        .iter()
        .any(|name| environment.get(name).is_some());
    if settled || !cfg!(target_env = "gnu") {
        return;
    }
    let heaps = std::thread::available_parallelism().map_or(2, |cores| cores.get().max(2));
    let mut arguments = std::env::args_os();
    let Ok(executable) = std::env::current_exe() else {
        return;
    };
    let mut again = Command::new(executable);
    if let Some(name) = arguments.next() {
        again.arg0(name);
    }
    // Only a failure comes back: the server then runs as it is.
    let _failed = again
        .args(arguments)
        .env(VARIABLE, heaps.to_string())
        .exec();
}
