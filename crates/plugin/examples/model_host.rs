//! A model host without the server around it, for `tests/host.rs` and for a profiler. It serves on
//! the socket that is its standard input, like the server's hidden `worker` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    ts_host::run()
}
