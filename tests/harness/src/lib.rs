//! Starts the real server on free ports, makes models for its echo backend, and talks to it.
//!
//! ```no_run
//! let server = ts_test::Server::new("target/debug/torchserve").start();
//! server.echo_model("m", "1.0", "");
//! server.manage("POST", "/models?url=m&initial_workers=1").send().expect(200);
//! ```

#![expect(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test stops where it fails"
)]

mod client;
mod origin;
mod page;
mod server;

pub use client::{Answer, Opened, Request};
pub use origin::{Asked, Origin, write_answer, write_head};
pub use page::Page;
pub use server::{Background, Ran, Running, Server};

/// Runs a test of each of these at the same time: for those that mostly wait.
pub fn at_once<T: Send>(cases: impl IntoIterator<Item = T>, test: impl Fn(T) + Sync) {
    std::thread::scope(|scope| {
        for case in cases {
            let test = &test;
            scope.spawn(move || test(case));
        }
    });
}
