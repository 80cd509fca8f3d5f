//! The `torchserve` command.
//!
//! A request's way through the server, and where to read on:
//!
//! 1. [`listen`] binds the sockets; [`transport`] takes connections off them, encrypted by [`tls`]
//!    where they have to be, and requests off those for [`rest::serve`]; [`rest::routes`] has every
//!    path of every port in one table.
//! 2. [`auth`] decides whether the route's action may be done; `rest/trace.rs` gives the request
//!    its id, and counts and logs the response.
//! 3. `rest/torchserve/` decodes the request ([`rest::body`]), calls one of the two services of
//!    `ts-serving`, and encodes what comes back (`rest/respond.rs`).
//! 4. A failure carries its class up to [`status`], the only file that knows status numbers.
//!
//! [`app`] wires all of it together from the [`settings`] and has [`startup`] load the models, or
//! those that [`snapshots`] kept;
//! [`shutdown`] takes it apart again, with [`doors`] that nobody is left in front of; [`launch`] starts
//! and stops servers in the background; [`budget`] bounds the memory of bodies; [`telemetry`] logs and
//! measures, without the secrets of URLs ([`redact`]); [`work_dir`] holds what is unpacked.

#![allow(
    rustdoc::private_intra_doc_links,
    reason = "this is for those who work on the server"
)]

mod app;
mod arenas;
mod auth;
#[cfg(feature = "bench")]
#[doc(hidden)]
pub mod bench;
mod budget;
mod cli;
mod doors;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod launch;
mod listen;
mod redact;
mod rest;
mod settings;
mod shutdown;
mod snapshots;
mod startup;
mod status;
mod telemetry;
mod tls;
mod transport;
mod work_dir;

use std::process::ExitCode;

/// Runs the command that the process was started with.
///
/// Its exit status is the contract's: 0, 1 for a server that cannot start, 2 for wrong usage.
pub fn run() -> ExitCode {
    // A host is this executable too, and nothing of a server may exist in it: no runtime, no
    // threads, no log.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|argument| argument == "worker")
    {
        return ts_host::run();
    }
    match cli::Options::of_process() {
        Ok(options) => launch::run(&options),
        Err(printed) => printed,
    }
}
