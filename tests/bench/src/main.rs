//! The two programs that `run.py` measures with: a load generator, and the least that an HTTP server
//! on the same actix can do, as the mark that the server is compared to.

mod echo;
mod load;
mod reply;

use std::io::{self, Write as _};

use clap::{Parser, Subcommand};

/// Measures HTTP servers.
#[derive(Debug, Parser)]
#[command(name = "ts-bench")]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Answer every request with its body; prints the port once it listens
    Echo(echo::Options),
    /// Send one request after the other on each of some connections, and count
    Load(load::Options),
}

fn main() -> anyhow::Result<()> {
    match Options::parse().command {
        Command::Echo(options) => echo::run(&options),
        Command::Load(options) => {
            let report = load::run(&options)?;
            let text = if options.json {
                serde_json::to_string(&report)?
            } else {
                report.to_string()
            };
            Ok(writeln!(io::stdout(), "{text}")?)
        }
    }
}
