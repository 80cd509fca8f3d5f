//! The `torchserve` executable; all of it is in the library, where fuzzing can reach it too.

use std::process::ExitCode;

fn main() -> ExitCode {
    ts_server::run()
}
