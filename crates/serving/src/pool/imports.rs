//! Which modules a model imports and which it brings.
//!
//! What it imports is a guess, made by reading its sources and not by running them: too few and the
//! host imports them itself, too many and the zygote holds some that nobody needs. What it brings is
//! what lies in its folder.

use std::io::Read as _;
use std::path::Path;

/// Sources that are read of one model, and bytes of each.
const MAX_FILES: usize = 64;
const MAX_BYTES: u64 = 1 << 20;

/// The package whose handlers need all that can be imported ahead.
const OUR_HANDLERS: &str = "torch_handler";

/// The modules of a model.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Modules {
    /// Those that it seems to import.
    pub(crate) imported: Vec<String>,
    /// Those that it brings: files and folders by whose name one can be imported.
    pub(crate) own: Vec<String>,
}

impl Modules {
    /// Looks at a model's folder. A handler that is not a file of it is one of ours.
    pub(crate) fn of(model_dir: &Path, handler: &str, candidates: &[String]) -> Self {
        let own = importable(model_dir);
        let file = handler.split(':').next().unwrap_or(handler);
        let stem = file.strip_suffix(".py").unwrap_or(file);
        let is_ours = !stem.contains(['/', '.']) && !own.iter().any(|name| name == stem);
        let sources = sources(model_dir);
        let is_named = |name: &str| sources.iter().any(|source| names(source, name));
        if is_ours || is_named(OUR_HANDLERS) {
            return Self {
                imported: candidates.to_vec(),
                own,
            };
        }
        let imported = candidates.iter().filter(|candidate| {
            // `PIL.Image` is named by `from PIL import Image`.
            is_named(candidate.split('.').next().unwrap_or(candidate))
        });
        Self {
            imported: imported.cloned().collect(),
            own,
        }
    }
}

fn importable(model_dir: &Path) -> Vec<String> {
    let Ok(entries) = fs_err::read_dir(model_dir) else {
        return Vec::new();
    };
    let names = entries.flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        // `module.py`, `module.cpython-311-x86_64-linux-gnu.so`, or a folder.
        let stem = name.split('.').next()?;
        let is_module = name.ends_with(".py") || name.ends_with(".so") || name == stem;
        is_module.then(|| stem.to_owned())
    });
    names.collect()
}

fn sources(model_dir: &Path) -> Vec<String> {
    let Ok(entries) = fs_err::read_dir(model_dir) else {
        return Vec::new();
    };
    let files = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "py"));
    let texts = files.take(MAX_FILES).filter_map(|path| {
        let mut bytes = Vec::new();
        let file = fs_err::File::open(path).ok()?;
        file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    });
    texts.collect()
}

/// Whether a source has `name` as a word of its own on a line that imports.
fn names(source: &str, name: &str) -> bool {
    let imports = source.lines().map(str::trim_start).filter(|line| {
        line.starts_with("import ") || line.starts_with("from ") || line.contains("import_module")
    });
    imports.into_iter().any(|line| {
        line.split(|c: char| !c.is_alphanumeric() && c != '_')
            .any(|word| word == name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(handler: &str, source: &str) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        fs_err::write(folder.path().join("handler.py"), source).unwrap();
        let candidates = ["torch", "PIL.Image"].map(str::to_owned);
        Modules::of(folder.path(), handler, &candidates).imported
    }

    #[test]
    fn a_model_brings_what_can_be_imported_from_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        for file in [
            "handler.py",
            "fast.cpython-311.so",
            "weights.pt",
            "a.tar.py.txt",
        ] {
            fs_err::write(folder.path().join(file), "").unwrap();
        }
        fs_err::create_dir(folder.path().join("package")).unwrap();
        let mut own = Modules::of(folder.path(), "handler.py", &[]).own;
        own.sort();
        assert_eq!(own, ["fast", "handler", "package"]);
    }

    #[test]
    fn a_module_that_a_source_imports_is_named() {
        for source in [
            "import torch\n",
            "import os, torch\n",
            "from torch.nn import Module\n",
            "def load():\n    import torch as t\n",
            "torch = importlib.import_module('torch')\n",
        ] {
            assert_eq!(named("handler.py", source), ["torch"], "{source}");
            assert_eq!(named("handler:handle", source), ["torch"], "{source}");
        }
        assert_eq!(
            named("handler.py", "from PIL import Image\n"),
            ["PIL.Image"]
        );
    }

    #[test]
    fn a_module_that_is_only_spoken_of_is_not() {
        for source in [
            "# like torch\nimport json\n",
            "import torches\n",
            "x = 'torch'\n",
        ] {
            assert!(named("handler.py", source).is_empty(), "{source}");
        }
    }

    #[test]
    fn our_own_handlers_need_everything() {
        assert_eq!(named("image_classifier", "").len(), 2);
        let source = "from ts.torch_handler.image_classifier import ImageClassifier\n";
        assert_eq!(named("handler.py", source).len(), 2);
    }
}
