//! Which code a manifest's `handler` means, and whether a file has it (*torchserve-contract* 3.4).

use crate::python::{Outline, is_identifier};

/// Handlers that TorchServe brings along: an archive names them without a file of its own.
pub const DEFAULT_HANDLERS: [&str; 8] = [
    "base_handler",
    "text_classifier",
    "image_classifier",
    "object_detector",
    "image_segmenter",
    "dali_image_classifier",
    "vllm_handler",
    "trt_llm_handler",
];

/// Those of them that this server has so far; a test holds the list to the package `ts`.
pub const SHIPPED_HANDLERS: [&str; 6] = [
    "base_handler",
    "text_classifier",
    "image_classifier",
    "object_detector",
    "image_segmenter",
    "dali_image_classifier",
];

/// A handler as it is written: a module or file, and maybe a name in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandlerName<'a> {
    /// `dir/h.py`, `dir/h`, `pkg.mod.h`, or the name of a default handler.
    pub module: &'a str,
    /// The function or class after `:`.
    pub entry: Option<&'a str>,
}

impl<'a> HandlerName<'a> {
    /// Splits at the last `:`.
    pub fn parse(text: &'a str) -> Self {
        match text.rsplit_once(':') {
            Some((module, entry)) => Self {
                module,
                entry: Some(entry),
            },
            None => Self {
                module: text,
                entry: None,
            },
        }
    }

    /// Whether it means a handler of TorchServe's own, where the model has no file of that name.
    pub fn is_default(&self) -> bool {
        DEFAULT_HANDLERS.contains(&self.base())
    }

    /// Whether this server has the default handler that it means.
    pub fn is_shipped(&self) -> bool {
        SHIPPED_HANDLERS.contains(&self.base())
    }

    /// The module without folders and suffix.
    fn base(&self) -> &'a str {
        let module = self.module.strip_suffix(".py").unwrap_or(self.module);
        module.rsplit('/').next().unwrap_or(module)
    }

    /// The files inside a model that may hold it, the likeliest first, each with the name to look
    /// for in it: `pkg.mod.x` is a module `x`, or the function or class `x` of a module.
    pub fn places(&self) -> Vec<(String, Option<&'a str>)> {
        let mut places = Vec::new();
        let mut add = |module: &str, entry| {
            places.push((format!("{module}.py"), entry));
            places.push((format!("{module}/__init__.py"), entry));
        };
        add(self.base(), self.entry);
        if self.is_dotted() {
            add(&self.module.replace('.', "/"), self.entry);
            if let (None, Some((module, name))) = (self.entry, self.module.rsplit_once('.')) {
                add(&module.replace('.', "/"), Some(name));
            }
        }
        places
    }

    /// Whether it is spelt as a module inside a package.
    pub fn is_dotted(&self) -> bool {
        self.module.contains('.')
            && !self.module.ends_with(".py")
            && self.module.split('.').all(is_identifier)
    }
}

/// Why a file cannot serve as a handler.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandlerFault {
    /// The name after `:` is not in the file.
    #[error("`{file}` has no function or class `{entry}` at its top level; it has {defined}")]
    EntryMissing {
        /// The file.
        file: String,
        /// The name asked for.
        entry: String,
        /// What there is instead.
        defined: String,
    },
    /// Neither function nor class.
    #[error("`{file}` has neither a function `handle` nor a class at its top level")]
    NothingToCall {
        /// The file.
        file: String,
    },
    /// More than one class, and nothing says which.
    #[error(
        "`{file}` defines more than one class: {candidates}; name the handler as \
         `{module}:<class>`, or move the others to a file of their own"
    )]
    Ambiguous {
        /// The file.
        file: String,
        /// The classes.
        candidates: String,
        /// The file without `.py`.
        module: String,
    },
}

/// Whether the source `text` of `file` has what a handler needs.
///
/// # Errors
/// [`HandlerFault`], with the candidates where there are some.
pub fn check_source(file: &str, text: &str, entry: Option<&str>) -> Result<(), HandlerFault> {
    let outline = Outline::of(text);
    let file = file.to_owned();
    if let Some(entry) = entry
        && !outline.has(entry)
    {
        // TorchServe falls back to the only class, whose method `handle` is what is meant.
        if entry == "handle" && outline.classes.len() == 1 {
            return Ok(());
        }
        let names: Vec<_> = outline.functions.iter().chain(&outline.classes).collect();
        let defined = if names.is_empty() {
            "none at all".to_owned()
        } else {
            listed(&names)
        };
        return Err(HandlerFault::EntryMissing {
            file,
            entry: entry.to_owned(),
            defined,
        });
    }
    if entry.is_some() || outline.has("handle") {
        return Ok(());
    }
    match outline.classes.as_slice() {
        [] => Err(HandlerFault::NothingToCall { file }),
        [_] => Ok(()),
        classes => Err(HandlerFault::Ambiguous {
            candidates: listed(&classes.iter().collect::<Vec<_>>()),
            module: file.strip_suffix(".py").unwrap_or(&file).to_owned(),
            file,
        }),
    }
}

fn listed(names: &[&String]) -> String {
    names
        .iter()
        .map(|name| format!("`{name}`"))
        .collect::<Vec<_>>()
        .join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_handlers_are_those_that_the_package_has() {
        let package = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../handlers/ts/torch_handler"
        );
        for name in DEFAULT_HANDLERS {
            let file = std::path::Path::new(package).join(format!("{name}.py"));
            assert_eq!(SHIPPED_HANDLERS.contains(&name), file.is_file(), "{name}");
        }
    }

    #[test]
    fn spellings_name_the_files_they_may_mean() {
        let files = |text| -> Vec<_> {
            HandlerName::parse(text)
                .places()
                .into_iter()
                .map(|(file, _)| file)
                .collect()
        };
        assert_eq!(files("h.py")[0], "h.py");
        assert_eq!(files("dir/h:handle")[0], "h.py");
        assert_eq!(files("h.py:MyHandler")[0], "h.py");
        assert!(files("pkg.mod.handler").contains(&"pkg/mod/handler.py".to_owned()));
        assert!(HandlerName::parse("image_classifier").is_default());
        assert!(HandlerName::parse("x/image_classifier.py:handle").is_default());
        let dotted = HandlerName::parse("pkg.mod.answer");
        assert!(
            dotted
                .places()
                .contains(&("pkg/mod.py".to_owned(), Some("answer")))
        );
        assert!(!HandlerName::parse("a/b.c").is_dotted());
    }

    #[test]
    fn a_source_needs_one_class_or_the_named_entry() {
        let check = |text, entry| check_source("h.py", text, entry);
        assert_eq!(check("class A: pass", None), Ok(()));
        assert_eq!(check("class A: pass\nclass B: pass", Some("B")), Ok(()));
        assert_eq!(
            check("class A: pass\nclass B: pass\nhandle = A().handle", None),
            Ok(())
        );
        assert_eq!(
            check("class A:\n  def handle(self): pass", Some("handle")),
            Ok(())
        );
        let error = check("class A: pass\nclass B: pass", None)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("`A`, `B`") && error.contains("`h:<class>`"),
            "{error}"
        );
        let error = check("def other(): pass", Some("handle"))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("`handle`") && error.contains("`other`"),
            "{error}"
        );
        assert!(matches!(
            check("import x", None),
            Err(HandlerFault::NothingToCall { .. })
        ));
    }
}
