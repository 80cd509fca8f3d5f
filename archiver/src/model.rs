//! From flags to an archive: everything is checked before anything is written.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use fs_err as fs;
use indicatif::{ProgressBar, ProgressStyle};
use ts_archive::{
    ArchiveError, DEFAULT_HANDLERS, Entries, HandlerName, Manifest, ManifestModel, MemberPath,
    ModelConfig, Packing, SHIPPED_HANDLERS, check_requirements, check_source, is_identifier,
};
use ts_types::{ModelName, Runtime, Version};

use crate::cli::{PackArgs, RuntimeArg};
use crate::extra;

/// Default handlers whose only use is to run given weights.
const NEED_WEIGHTS: [&str; 4] = [
    "text_classifier",
    "image_classifier",
    "object_detector",
    "image_segmenter",
];

/// Packs the model. `created` fixes the time in the manifest.
pub(crate) fn pack(args: &PackArgs, created: Option<u64>) -> Result<ExitCode> {
    let name = model_name(args.model_name.as_deref().unwrap_or_default())?;
    let version = Version::new(args.version.as_deref().unwrap_or_default())
        .context("--version cannot be used")?;
    let handler = args.handler.as_deref().unwrap_or_default();
    let folder = args.export_path.as_deref().unwrap_or(Path::new("."));
    if folder.exists() && !folder.is_dir() {
        bail!(
            "--export-path `{}` is a file; give a folder",
            folder.display()
        );
    }
    let mut entries = Entries::default();
    let mut add = |flag: &str, file: &Option<PathBuf>| -> Result<Option<String>> {
        let Some(path) = file else { return Ok(None) };
        if path.is_dir() {
            bail!(
                "{flag} `{}` is a folder; give a file, or use --extra-files",
                path.display()
            );
        }
        if !path.exists() {
            return Err(ArchiveError::NotFound { path: path.clone() }).context(flag.to_owned());
        }
        Ok(Some(
            extra::add_file(&mut entries, path)?.as_str().to_owned(),
        ))
    };
    let mut model = ManifestModel {
        model_name: Some(name.to_string()),
        model_version: Some(version.to_string()),
        serialized_file: add("--serialized-file", &args.serialized_file)?,
        model_file: add("--model-file", &args.model_file)?,
        requirements_file: add("--requirements-file", &args.requirements_file)?,
        config_file: add("--config-file", &args.config_file)?,
        ..ManifestModel::default()
    };
    if let Some(list) = &args.extra_files {
        extra::add(&mut entries, list, args.keep_dirs)?;
    }
    model.handler = Some(match args.runtime {
        RuntimeArg::Lsp => native_handler(handler, &mut entries)?,
        RuntimeArg::Python | RuntimeArg::Python3 => python_handler(handler, &mut entries)?,
    });
    if model.serialized_file.is_none() && NEED_WEIGHTS.contains(&handler) {
        bail!("handler `{handler}` runs the weights it is given; add --serialized-file");
    }
    check_contents(args)?;
    make_folder(folder)?;
    let packing = Packing {
        name,
        manifest: Manifest {
            created_on: None,
            runtime: Runtime::from(args.runtime),
            model,
            archiver_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        },
        entries,
        format: args.archive_format.into(),
        folder: folder.to_owned(),
        overwrite: args.force,
        created,
    };
    write(&packing)?;
    Ok(ExitCode::SUCCESS)
}

/// TorchServe's rule for names, stricter than the server's: the name becomes a file name.
fn model_name(text: &str) -> Result<ModelName> {
    let plain = text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'));
    if !plain {
        bail!(
            "model name `{}` contains special characters; allowed are names that match \
             ^[A-Za-z0-9][A-Za-z0-9_\\-.]*$",
            text.escape_debug()
        );
    }
    ModelName::new(text).context("--model-name cannot be used")
}

/// The manifest's spelling of a handler of the C++ runtime: a name it knows, or a shared library,
/// which is added.
fn native_handler(text: &str, entries: &mut Entries) -> Result<String> {
    if matches!(text, "BaseHandler" | "TorchScriptHandler") {
        return Ok(text.to_owned());
    }
    let path = Path::new(text);
    if !path.is_file() {
        bail!(
            "handler `{text}` is neither `BaseHandler`, `TorchScriptHandler` nor an existing \
             shared library"
        );
    }
    Ok(extra::add_file(entries, path)?.as_str().to_owned())
}

/// The manifest's spelling of a Python handler, whose file is added unless it came with the extra
/// files. Base names only: nothing refers to the folder that was packed from.
fn python_handler(text: &str, entries: &mut Entries) -> Result<String> {
    let handler = HandlerName::parse(text);
    if DEFAULT_HANDLERS.contains(&text) {
        return Ok(text.to_owned());
    }
    if let Some(entry) = handler.entry
        && !is_identifier(entry)
    {
        bail!("handler `{text}`: `{entry}` is not the name of a function or class");
    }
    let with_suffix = match handler.module.strip_suffix(".py") {
        Some(_) => PathBuf::from(handler.module),
        None => PathBuf::from(format!("{}.py", handler.module)),
    };
    if with_suffix.is_file() {
        check(&with_suffix, handler.entry)?;
        let member = extra::add_file(entries, &with_suffix)?;
        let module = member.as_str().trim_end_matches(".py");
        return Ok(match handler.entry {
            Some(entry) => format!("{module}:{entry}"),
            None => member.as_str().to_owned(),
        });
    }
    let packed = handler
        .is_dotted()
        .then(|| packed_module(&handler, entries))
        .flatten();
    let Some((source, entry)) = packed else {
        let hint = if handler.is_dotted() {
            "; a module of a package must be among the extra files: add the package's folder to \
             --extra-files and give --keep-dirs"
        } else {
            ""
        };
        bail!(
            "handler `{text}` is neither a default handler nor a file: `{}` does not exist{hint}",
            with_suffix.display()
        );
    };
    check(&source, entry)?;
    Ok(text.to_owned())
}

/// The source of a dotted module and the name to look for in it, if it is among the entries.
fn packed_module<'a>(
    handler: &HandlerName<'a>,
    entries: &Entries,
) -> Option<(PathBuf, Option<&'a str>)> {
    handler.places().into_iter().find_map(|(file, entry)| {
        let member = MemberPath::parse(&file).ok()?;
        Some((entries.source(&member)?.to_owned(), entry))
    })
}

fn check(source: &Path, entry: Option<&str>) -> Result<()> {
    let text = fs::read(source)?;
    let name = source.file_name().unwrap_or_default().to_string_lossy();
    Ok(check_source(&name, &String::from_utf8_lossy(&text), entry)?)
}

/// Reads what the server would read, so that it is refused here and not there.
#[expect(clippy::print_stderr, reason = "warnings of a command-line tool")]
fn check_contents(args: &PackArgs) -> Result<()> {
    let handler = args.handler.as_deref().unwrap_or_default();
    if DEFAULT_HANDLERS.contains(&handler) && !SHIPPED_HANDLERS.contains(&handler) {
        eprintln!("warning: this server does not have TorchServe's handler `{handler}` yet");
    }
    if let Some(path) = &args.config_file {
        for warning in ModelConfig::read(path)?.warnings {
            eprintln!("warning: `{}`: {warning}", path.display());
        }
    }
    if let Some(path) = &args.requirements_file {
        let refused = check_requirements(path)?;
        if !refused.is_empty() {
            let lines: Vec<_> = refused.iter().map(ToString::to_string).collect();
            bail!(lines.join("\n"));
        }
    }
    Ok(())
}

#[expect(clippy::print_stderr, reason = "a note of a command-line tool")]
fn make_folder(folder: &Path) -> Result<()> {
    if !folder.exists() {
        fs::create_dir_all(folder)?;
        eprintln!("note: created folder `{}`", folder.display());
    }
    Ok(())
}

/// Writes with a progress bar on stderr, where somebody is looking.
fn write(packing: &Packing) -> Result<()> {
    let bar = if std::io::stderr().is_terminal() {
        let style = ProgressStyle::with_template("{bytes}/{total_bytes} {wide_bar} {eta}")
            .context("the progress bar's template")?;
        ProgressBar::new(0).with_style(style)
    } else {
        ProgressBar::hidden()
    };
    let written = ts_archive::pack(packing, &mut |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
    });
    bar.finish_and_clear();
    written?;
    Ok(())
}
