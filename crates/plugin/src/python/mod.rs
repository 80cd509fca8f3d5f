//! Python: one interpreter per host, entered by worker threads only.

mod bridge;
mod convert;
mod interpreter;
mod output;
mod raised;
mod zygote;

pub(crate) use bridge::Session;
pub(crate) use interpreter::start;
pub(crate) use zygote::ZYGOTE;

/// Writes a line to the model's log, which is this process's standard error.
#[expect(
    clippy::print_stderr,
    reason = "a host's standard error is the model log"
)]
pub(crate) fn log(text: &str) {
    eprintln!("{text}");
}
