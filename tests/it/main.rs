//! The real server, on its echo backend: everything between a socket and a worker that needs
//! neither torch nor Python. `tests/python` does the same with Python handlers.

#![expect(clippy::unwrap_used, reason = "a test stops where it fails")]

mod addresses;
mod archives;
mod asynchronous;
mod batching;
mod command_line;
mod connections;
mod continuous;
mod cors;
mod health;
mod hosts;
mod http2;
mod limits;
mod logs;
mod malformed;
mod management;
mod metrics;
mod object_stores;
mod predict;
mod ranks;
mod registry;
mod rest;
mod scaling;
mod scheduling;
mod security;
mod settings;
mod shutdown;
mod snapshots;
mod sources;
mod streaming;
mod tls;
mod traces;

/// A server that has not been started; one per test, nothing is shared.
fn server() -> ts_test::Server {
    ts_test::Server::new(env!("CARGO_BIN_EXE_torchserve"))
}

/// A running server with one model `m` that has one worker; `yaml` is added to its configuration.
fn serving(yaml: &str) -> ts_test::Running {
    let server = server().echo_model("m", &format!("minWorkers: 1\nmaxWorkers: 1\n{yaml}"));
    let server = server.args(&["--models", "m"]).start();
    server.wait_ready("m");
    server
}
