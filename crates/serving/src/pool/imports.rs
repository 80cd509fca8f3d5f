//! Which of the modules that a zygote may import ahead a model is going to import: those that its
//! sources name. A guess, made by reading and not by running: too few and the host imports them
//! itself, too many and the zygote holds some that nobody needs.

use std::io::Read as _;
use std::path::Path;

/// Sources that are read of one model, and bytes of each.
const MAX_FILES: usize = 64;
const MAX_BYTES: u64 = 1 << 20;

/// The package whose handlers need all that can be imported ahead.
const OUR_HANDLERS: &str = "torch_handler";

/// Those of `candidates` that a model's sources name. A handler that is not a file of the archive
/// is one of ours.
pub(crate) fn named_in(model_dir: &Path, handler: &str, candidates: &[String]) -> Vec<String> {
    let file = handler.split(':').next().unwrap_or(handler);
    let stem = file.strip_suffix(".py").unwrap_or(file);
    if !model_dir.join(format!("{stem}.py")).is_file() && !stem.contains(['/', '.']) {
        return candidates.to_vec();
    }
    let sources = sources(model_dir);
    let is_named = |name: &str| sources.iter().any(|source| names(source, name));
    if is_named(OUR_HANDLERS) {
        return candidates.to_vec();
    }
    let named = candidates.iter().filter(|candidate| {
        // `PIL.Image` is named by `from PIL import Image`.
        is_named(candidate.split('.').next().unwrap_or(candidate))
    });
    named.cloned().collect()
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
        named_in(folder.path(), handler, &candidates)
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
