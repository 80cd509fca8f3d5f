//! Every reason why a server would not load an archive, found without a server.

use std::error::Error;
use std::io::{self, Write};
use std::path::Path;

use fs_err as fs;
use serde::Serialize;
use ts_types::{ModelName, Runtime, Version};

use crate::error::{ArchiveError, Doing};
use crate::handler::{HandlerName, check_source};
use crate::manifest::{MANIFEST_PATH, Manifest};
use crate::model_config::ModelConfig;
use crate::pickles::refuse_pickles;
use crate::pinned::signed;
use crate::read::{self, Kind};
use crate::requirements::check_requirements;
use crate::signature::{TrustedKeys, read_signature};
use crate::unpack::{UnpackLimits, create, model_root, unpack};

/// One reason why an archive would not be loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// What it is about: `archive`, `manifest`, or a field of the manifest.
    pub about: &'static str,
    /// What is wrong and what to do.
    pub message: String,
}

/// Reads the archive as the server would and collects all that is wrong with it.
///
/// # Errors
/// When there is nothing at `source`, or a temporary folder cannot be written.
pub fn verify(source: &Path, limits: &UnpackLimits) -> Result<Vec<Problem>, ArchiveError> {
    let mut problems = Vec::new();
    let scratch = tempfile::tempdir().doing("create", &std::env::temp_dir())?;
    let root = match read::kind(source) {
        Err(error @ (ArchiveError::NotFound { .. } | ArchiveError::Io { .. })) => {
            return Err(error);
        }
        Err(error) => return Ok(vec![Problem::archive(&error)]),
        Ok(Kind::Folder) => model_root(source)?,
        Ok(kind) => {
            let tree = scratch.path();
            let read = read::members(
                source,
                limits,
                &mut |member| {
                    let target = member.path.below(tree);
                    if member.is_folder {
                        return fs::create_dir_all(&target).doing("create", &target);
                    }
                    if let Some(folder) = target.parent() {
                        fs::create_dir_all(folder).doing("create", folder)?;
                    }
                    let file = create(&target, false)?;
                    let mut sample = Sample { file, size: 0 };
                    member.copy_to(&mut sample, &target)?;
                    sample.finish().doing("write", &target)
                },
                &mut |fault| {
                    problems.push(Problem::archive(&fault));
                    Ok(())
                },
            );
            match read {
                Err(error @ ArchiveError::Io { .. }) => return Err(error),
                Err(error) => {
                    problems.push(Problem::archive(&error));
                    return Ok(problems);
                }
                Ok(()) if kind == Kind::Tar => model_root(tree)?,
                Ok(()) => tree.to_owned(),
            }
        }
    };
    check_model(&root, source, &mut problems)?;
    Ok(problems)
}

impl TrustedKeys {
    /// Why a server that trusts these keys, and asks for a signature, would not take an archive.
    ///
    /// # Errors
    /// As [`verify`].
    pub fn problem(
        &self,
        source: &Path,
        limits: &UnpackLimits,
    ) -> Result<Option<Problem>, ArchiveError> {
        let signature = read_signature(source)?;
        let checked = self.check(signed(source, limits)?, signature.as_deref());
        Ok(checked.err().map(|fault| {
            let error = ArchiveError::NotTrusted {
                archive: source.to_owned(),
                fault,
                trusted: self.ids(),
            };
            Problem::of("signature", &error)
        }))
    }
}

/// Why a server with `load_policy=strict` would not take an archive that it could unpack.
///
/// # Errors
/// As [`unpack`].
pub fn strict_problem(
    source: &Path,
    limits: &UnpackLimits,
) -> Result<Option<Problem>, ArchiveError> {
    let scratch = tempfile::tempdir().doing("create", &std::env::temp_dir())?;
    let artifact = unpack(source, scratch.path(), limits)?;
    match refuse_pickles(&artifact.dir, source) {
        Err(error @ ArchiveError::HoldsPickle { .. }) => Ok(Some(Problem::archive(&error))),
        Err(error) => Err(error),
        Ok(()) => Ok(None),
    }
}

impl Problem {
    fn archive(error: &ArchiveError) -> Self {
        Self {
            about: "archive",
            message: with_causes(error),
        }
    }

    fn of(about: &'static str, error: &dyn Error) -> Self {
        Self {
            about,
            message: with_causes(error),
        }
    }
}

fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    text
}

/// Keeps small members, which are looked into; of large ones only name and size matter, so a hole
/// stands in for them and weights are not copied.
struct Sample {
    file: fs::File,
    size: u64,
}

impl Sample {
    const KEPT_BYTES: u64 = 2 << 20;

    fn finish(self) -> io::Result<()> {
        self.file.set_len(self.size)
    }
}

impl Write for Sample {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.size < Self::KEPT_BYTES {
            self.file.write_all(bytes)?;
        }
        self.size += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn check_model(
    root: &Path,
    source: &Path,
    problems: &mut Vec<Problem>,
) -> Result<(), ArchiveError> {
    if !root.join(MANIFEST_PATH).is_file() {
        problems.push(Problem {
            about: "manifest",
            message: format!(
                "there is no `{MANIFEST_PATH}`; the model can only be registered with both \
                 `model_name=` and `handler=`"
            ),
        });
        return Ok(());
    }
    let manifest = match Manifest::read_of(root, source) {
        Ok(manifest) => manifest,
        Err(error) => {
            problems.push(Problem::of("manifest", &error));
            return Ok(());
        }
    };
    check_names(&manifest, source, problems);
    for (field, file) in manifest.model.file_fields() {
        if let Some(file) = file
            && !root.join(file).is_file()
        {
            let (archive, file) = (source.to_owned(), file.to_owned());
            problems.push(Problem::of(
                field_name(field),
                &ArchiveError::NamedFileMissing {
                    archive,
                    field,
                    file,
                },
            ));
        }
    }
    let present = |file: &Option<String>| {
        file.as_ref()
            .map(|file| root.join(file))
            .filter(|path| path.is_file())
    };
    if let Some(path) = present(&manifest.model.config_file)
        && let Err(error) = ModelConfig::read(&path)
    {
        problems.push(Problem::of("model.configFile", &error));
    }
    if let Some(path) = present(&manifest.model.requirements_file) {
        let refused = check_requirements(&path)?;
        problems.extend(
            refused
                .iter()
                .map(|line| Problem::of("model.requirementsFile", line)),
        );
    }
    if let Err(message) = check_handler(root, &manifest) {
        problems.push(Problem {
            about: "model.handler",
            message,
        });
    }
    Ok(())
}

fn field_name(field: &str) -> &'static str {
    match field {
        "serializedFile" => "model.serializedFile",
        "modelFile" => "model.modelFile",
        "requirementsFile" => "model.requirementsFile",
        "configFile" => "model.configFile",
        _ => "model.sourceVocab",
    }
}

fn check_names(manifest: &Manifest, source: &Path, problems: &mut Vec<Problem>) {
    match manifest.model_name(source) {
        Err(error) => problems.push(Problem::of("model.modelName", &error)),
        Ok(name) => {
            if let Err(error) = ModelName::new(name) {
                problems.push(Problem::of("model.modelName", &error));
            }
        }
    }
    if let Some(Err(error)) = manifest.model.model_version.as_deref().map(Version::new) {
        problems.push(Problem::of("model.modelVersion", &error));
    }
}

fn check_handler(root: &Path, manifest: &Manifest) -> Result<(), String> {
    let Some(text) = manifest.model.handler.as_deref() else {
        return match manifest.runtime {
            Runtime::Echo => Ok(()),
            _ => Err(
                "the manifest names no handler; register with `handler=`, or pack the model \
                      again with `--handler`"
                    .to_owned(),
            ),
        };
    };
    match manifest.runtime {
        Runtime::Echo => return Ok(()),
        Runtime::Lsp => {
            return Err(
                "runtime `LSP` is TorchServe's C++ worker, which this server does not have; \
                        pack the model with `--runtime python`"
                    .to_owned(),
            );
        }
        Runtime::Python | Runtime::Python3 => {}
    }
    let handler = HandlerName::parse(text);
    let places = handler.places();
    let Some((file, entry)) = places.iter().find(|(file, _)| root.join(file).is_file()) else {
        if handler.is_shipped() {
            return Ok(());
        }
        if handler.is_default() {
            return Err(format!(
                "`{text}` is a handler of TorchServe's that this server does not have yet; pack a \
                 handler file of your own"
            ));
        }
        let files: Vec<_> = places.iter().map(|(file, _)| format!("`{file}`")).collect();
        return Err(format!(
            "`{text}` is neither a handler of the server nor in the archive, where it would be {}",
            files.join(" or ")
        ));
    };
    let source = fs::read(root.join(file)).map_err(|error| error.to_string())?;
    check_source(file, &String::from_utf8_lossy(&source), *entry).map_err(|fault| fault.to_string())
}
