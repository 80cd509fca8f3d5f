//! The command line: TorchServe's flags, with the rules of Python's `argparse`.

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{ArgAction, ArgGroup, CommandFactory as _, Parser, ValueEnum};

/// What is done instead of starting or stopping a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Command {
    /// Show every setting that these options give, with where it came from, and start nothing
    Config,
}

/// A path, which may be empty as it may be for `argparse`: that is none.
fn path() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

/// Serves PyTorch models.
#[derive(Debug, Clone, Default, Parser)]
#[command(
    name = "torchserve",
    infer_long_args = true,
    args_override_self = true,
    disable_version_flag = true,
    group = ArgGroup::new("action").args(["command", "version", "start", "stop"]).multiple(false)
)]
pub(crate) struct Options {
    /// `config`: show every setting with where it came from, and start nothing
    #[arg(value_enum, hide_possible_values = true)]
    pub(crate) command: Option<Command>,

    /// Print the version and exit
    #[arg(short = 'v', long, action = ArgAction::SetTrue)]
    pub(crate) version: bool,

    /// Start the server; what happens without this flag too
    #[arg(long)]
    pub(crate) start: bool,

    /// Stop the running server
    #[arg(long)]
    pub(crate) stop: bool,

    /// Configuration file; `TS_CONFIG_FILE` in the environment comes before it
    #[arg(long, value_parser = path(), value_name = "FILE")]
    pub(crate) ts_config: Option<PathBuf>,

    /// Folder that model archives are looked up in
    #[arg(long, value_parser = path(), value_name = "DIR")]
    pub(crate) model_store: Option<PathBuf>,

    /// Folder that workflow archives are looked up in
    #[arg(long, value_parser = path(), value_name = "DIR")]
    pub(crate) workflow_store: Option<PathBuf>,

    /// Models to load at start: `ALL`, or each one `file.mar`, `name=file.mar`, a folder or a URL
    #[arg(long, value_name = "MODEL", num_args = 1.., action = ArgAction::Set)]
    pub(crate) models: Vec<String>,

    /// Log4j configuration of TorchServe; the levels of its loggers count
    #[arg(long, value_parser = path(), value_name = "FILE")]
    pub(crate) log_config: Option<PathBuf>,

    /// Log configuration of TorchServe's C++ backend; accepted and not evaluated
    #[arg(long, value_parser = path(), value_name = "FILE")]
    pub(crate) cpp_log_config: Option<PathBuf>,

    /// Start: stay in the foreground. Stop: wait until the server has ended, at most 60 seconds
    #[arg(long)]
    pub(crate) foreground: bool,

    /// Neither write nor read snapshots
    #[arg(long, visible_alias = "ncs")]
    pub(crate) no_config_snapshots: bool,

    /// Java plugins of TorchServe; accepted and not loaded
    #[arg(long, visible_alias = "ppath", value_name = "PATH")]
    pub(crate) plugins_path: Option<String>,

    /// Do not ask for tokens
    #[arg(long, visible_alias = "dt")]
    pub(crate) disable_token_auth: bool,

    /// Allow registering and unregistering models over the API
    #[arg(long)]
    pub(crate) enable_model_api: bool,

    /// With `config`: as JSON
    #[arg(long, requires = "command")]
    pub(crate) json: bool,

    /// Write the addresses in use to this file, as JSON, once the server listens
    #[arg(long, value_name = "FILE", hide = true)]
    pub(crate) ready_file: Option<PathBuf>,

    /// This process is the background server of a `--start` that has returned
    #[arg(long, hide = true)]
    pub(crate) detached: bool,
}

impl Options {
    /// Reads the arguments of this process. What is printed instead ends it with the status that
    /// comes back: 0 for help, 2 for wrong usage, with the usage on standard error as `argparse`
    /// prints it.
    pub(crate) fn of_process() -> Result<Self, ExitCode> {
        Self::try_parse().map_err(|error| {
            // Whoever closed the output does not want to know.
            let _closed = error.print();
            let told = error.to_string();
            if error.use_stderr() && !told.contains("Usage:") {
                let usage = Self::command().render_usage();
                let _closed = writeln!(io::stderr(), "\n{usage}");
            }
            u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<Options, clap::Error> {
        Options::try_parse_from(["torchserve"].iter().chain(arguments))
    }

    #[test]
    fn the_forms_of_argparse_are_taken() {
        let options = parsed(&[
            "--start",
            "--model-st=/a b",
            "--models",
            "a.mar",
            "b=c.mar",
            "--ncs",
        ]);
        let options = options.unwrap();
        assert_eq!(options.model_store.unwrap(), PathBuf::from("/a b"));
        assert_eq!(options.models, ["a.mar", "b=c.mar"]);
        assert!(options.no_config_snapshots && options.start);
        assert!(
            parsed(&["--dt", "--ppath", "x"])
                .unwrap()
                .disable_token_auth
        );
        assert!(parsed(&["-v"]).unwrap().version);
        let shown = parsed(&["config", "--json", "--dt", "--ts-config="]).unwrap();
        assert_eq!(shown.command, Some(Command::Config));
        assert_eq!(shown.ts_config, Some(PathBuf::new()));
    }

    #[test]
    fn a_repeated_option_counts_as_given_last() {
        let options = parsed(&[
            "--model-store",
            "a",
            "--model-store",
            "b",
            "--models",
            "x",
            "--models",
            "y",
        ]);
        let options = options.unwrap();
        assert_eq!(options.model_store.unwrap(), PathBuf::from("b"));
        assert_eq!(options.models, ["y"]);
    }

    #[test]
    fn wrong_usage_ends_with_2() {
        for wrong in [
            &["--start", "--stop"][..],
            &["--no-such"],
            &["--models"],
            &["--model"],
            &["x"],
            &["config", "--start"],
            &["--json"],
            &["--start=1"],
        ] {
            assert_eq!(parsed(wrong).unwrap_err().exit_code(), 2, "{wrong:?}");
        }
    }
}
