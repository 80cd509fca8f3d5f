//! `torch-model-archiver`: packs a model, or looks at one that was packed.
//!
//! `cli` has the flags as they are typed, `model` turns them into an archive, `extra` finds the
//! extra files, `report` prints what is in an archive and what is wrong with it, `sign` makes keys and
//! signatures.

mod cli;
mod extra;
mod model;
mod report;
mod sign;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::{Cli, Command};

#[expect(
    clippy::print_stderr,
    reason = "the one place where the program complains"
)]
fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match &cli.command {
        Some(Command::Inspect(args)) => report::inspect(args),
        Some(Command::Verify(args)) => report::verify(args),
        Some(Command::Keygen(args)) => sign::keygen(args),
        Some(Command::Sign(args)) => sign::sign(args),
        None => source_date_epoch().and_then(|created| model::pack(&cli.pack, created)),
    };
    done.unwrap_or_else(|error| {
        eprintln!("torch-model-archiver: {error:#}");
        ExitCode::FAILURE
    })
}

/// The agreed way to fix the time that a build puts into its output.
fn source_date_epoch() -> anyhow::Result<Option<u64>> {
    #[expect(
        clippy::disallowed_methods,
        reason = "main reads the environment, once"
    )]
    let value = std::env::var("SOURCE_DATE_EPOCH");
    match value {
        Ok(text) if !text.is_empty() => text.parse().map(Some).map_err(|_| {
            anyhow::anyhow!("SOURCE_DATE_EPOCH is `{text}`; it must be seconds since 1970")
        }),
        _ => Ok(None),
    }
}
