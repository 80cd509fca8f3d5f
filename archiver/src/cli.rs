//! The flags, as TorchServe's archiver has them, and two commands of our own.

use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use ts_archive::Format;
use ts_types::{LoadPolicy, Runtime};

/// Packs a model into an archive that the server can load.
#[derive(Debug, Parser)]
#[command(
    name = "torch-model-archiver",
    disable_version_flag = true,
    disable_help_subcommand = true,
    infer_long_args = true,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    args_override_self = true
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    #[command(flatten)]
    pub(crate) pack: PackArgs,
}

/// Looking instead of packing.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show manifest, members, sizes and checksums of an archive.
    Inspect(LookArgs),
    /// Tell whether a server would load an archive, and every reason why not.
    Verify(VerifyArgs),
    /// Make a key to sign archives with.
    Keygen(KeygenArgs),
    /// Sign archives or folders of unpacked models: writes a file beside each.
    Sign(SignArgs),
}

/// What to verify, and how.
#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    pub(crate) look: LookArgs,
    /// Public keys, in files or folders, of those one of whom has to have signed it.
    #[arg(long, value_delimiter = ',', value_name = "PATHS")]
    pub(crate) trusted_keys: Vec<PathBuf>,
    /// Refuse what a server with this `load_policy` would refuse: `strict` takes no pickle.
    #[arg(long, value_name = "POLICY", default_value = "any")]
    pub(crate) load_policy: LoadPolicy,
}

/// Where the key goes.
#[derive(Debug, Args)]
pub(crate) struct KeygenArgs {
    /// File of the private key. The public one goes beside it, with `.pub` added to its name.
    pub(crate) path: PathBuf,
}

/// What to sign.
#[derive(Debug, Args)]
pub(crate) struct SignArgs {
    /// File of the private key.
    #[arg(long)]
    pub(crate) key: PathBuf,
    /// Archives, or folders of unpacked models.
    #[arg(required = true)]
    pub(crate) paths: Vec<PathBuf>,
}

/// What to look at.
#[derive(Debug, Args)]
pub(crate) struct LookArgs {
    /// The archive, or the folder of an unpacked model.
    pub(crate) path: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The flags of packing. The three required ones are optional here, as the commands do without.
#[derive(Debug, Args)]
pub(crate) struct PackArgs {
    /// Name of the model, and of the output: letters, digits, `_`, `-`, `.`, beginning with a
    /// letter or digit.
    #[arg(long, required = true)]
    pub(crate) model_name: Option<String>,
    /// Version of the model.
    #[arg(short = 'v', long, required = true)]
    pub(crate) version: Option<String>,
    /// Handler: the name of a default handler, a Python file, `file.py:name`, or `pkg.module`.
    #[arg(long, required = true)]
    pub(crate) handler: Option<String>,
    /// Weights or scripted model (.pt, .pth, .onnx, .so, ...).
    #[arg(long)]
    pub(crate) serialized_file: Option<PathBuf>,
    /// Python file with the class of an eager model.
    #[arg(long)]
    pub(crate) model_file: Option<PathBuf>,
    /// Comma-separated files, patterns (`*`, `?`, `[a-z]`) and folders, whose contents go to the
    /// top of the archive.
    #[arg(long)]
    pub(crate) extra_files: Option<String>,
    /// Keep each extra folder's own name as the top of its contents.
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) keep_dirs: bool,
    /// Folder for the output, made when it is missing [default: the current folder].
    #[arg(long)]
    pub(crate) export_path: Option<PathBuf>,
    /// What runs the model.
    #[arg(long, value_enum, default_value = "python")]
    pub(crate) runtime: RuntimeArg,
    /// Form of the output.
    #[arg(long, value_enum, default_value = "default")]
    pub(crate) archive_format: FormatArg,
    /// Replace an existing output.
    #[arg(short = 'f', long, action = ArgAction::SetTrue)]
    pub(crate) force: bool,
    /// Requirement list with the model's own Python packages.
    #[arg(short = 'r', long)]
    pub(crate) requirements_file: Option<PathBuf>,
    /// Model configuration, in YAML.
    #[arg(short = 'c', long)]
    pub(crate) config_file: Option<PathBuf>,
}

/// The runtimes that may be asked for when packing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RuntimeArg {
    #[value(name = "python")]
    Python,
    #[value(name = "python3")]
    Python3,
    #[value(name = "LSP")]
    Lsp,
}

impl From<RuntimeArg> for Runtime {
    fn from(runtime: RuntimeArg) -> Self {
        match runtime {
            RuntimeArg::Python => Self::Python,
            RuntimeArg::Python3 => Self::Python3,
            RuntimeArg::Lsp => Self::Lsp,
        }
    }
}

/// The forms of an archive, by TorchServe's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    /// A deflated `.mar`.
    #[value(name = "default")]
    Default,
    /// A `.tar.gz`.
    #[value(name = "tgz")]
    Tgz,
    /// A folder.
    #[value(name = "no-archive")]
    NoArchive,
    /// A `.mar` that is not compressed.
    #[value(name = "zip-store")]
    ZipStore,
}

impl From<FormatArg> for Format {
    fn from(format: FormatArg) -> Self {
        match format {
            FormatArg::Default => Self::Mar,
            FormatArg::Tgz => Self::Tgz,
            FormatArg::NoArchive => Self::Folder,
            FormatArg::ZipStore => Self::ZipStore,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }
}
