//! Starts the real server on free ports, makes models for its echo backend, and talks to it.
//!
//! ```no_run
//! let server = ts_test::Server::new(env!("CARGO_BIN_EXE_torchserve")).start();
//! server.echo_model("m", "");
//! ```

#![expect(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test stops where it fails"
)]

mod client;
mod server;

pub use client::{Answer, Request};
pub use server::{Running, Server};
