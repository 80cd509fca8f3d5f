//! What the rules in `tests/` read: the repository's files, its manifests and the tokens of its Rust
//! sources. A rule that was said twice in review becomes a test there.

use std::path::PathBuf;
use std::str::FromStr;

use proc_macro2::{TokenStream, TokenTree};
use walkdir::WalkDir;

/// Folders that hold no work of ours: build outputs, environments, other tools' state.
const NOT_OURS: &[&str] = &[
    "target",
    "build",
    "logs",
    "node_modules",
    "__pycache__",
    "fuzz_corpus",
];

/// A text file of the repository.
#[derive(Debug)]
pub struct SourceFile {
    /// Relative to the repository's root, with `/` between its parts.
    pub path: String,
    /// Its whole text.
    pub text: String,
}

/// The repository's root.
///
/// Taken from the folder a test is run in, its package's, and not from the one it was compiled in: a
/// target folder may be shared by two clones.
///
/// # Panics
///
/// If a test was started by hand from somewhere else.
#[must_use]
pub fn root() -> PathBuf {
    let house = std::env::current_dir().expect("a test has a current folder");
    let root = house.ancestors().nth(2).unwrap_or(&house);
    assert!(
        root.join("tests/house").is_dir(),
        "run the house tests with `cargo test -p ts-house`"
    );
    root.to_path_buf()
}

/// The text of the file at `path` below the root.
#[must_use]
pub fn read(path: &str) -> String {
    fs_err::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{error}"))
}

/// Every file of the repository whose name ends in one of `endings`, sorted by path.
///
/// The walk stays out of hidden folders and build outputs, so that an environment or a clone made
/// inside the repository is not judged.
#[must_use]
pub fn files(endings: &[&str]) -> Vec<SourceFile> {
    let root = root();
    let ours = |entry: &walkdir::DirEntry| {
        let name = entry.file_name().to_string_lossy();
        entry.depth() == 0
            || !(entry.file_type().is_dir()
                && (name.starts_with('.') && name != ".ci" || NOT_OURS.contains(&name.as_ref())))
    };
    let mut found = Vec::new();
    for entry in WalkDir::new(&root).into_iter().filter_entry(ours) {
        let entry = entry.unwrap_or_else(|error| panic!("{error}"));
        let name = entry.file_name().to_string_lossy();
        if entry.file_type().is_file() && endings.iter().any(|ending| name.ends_with(ending)) {
            let path = entry
                .path()
                .strip_prefix(&root)
                .expect("the walk starts at the root");
            let path = path.to_string_lossy().into_owned();
            // A file that a parallel build removed again is nobody's fault.
            if let Ok(text) = fs_err::read_to_string(entry.path()) {
                found.push(SourceFile { path, text });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

/// One token of Rust code. Comments are none, and a string or character is one token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// As written; a bracket is a token of its own.
    pub text: String,
    /// Counted from 1.
    pub line: usize,
}

/// The tokens of a Rust source, brackets included, in the order of the text.
#[must_use]
pub fn tokens(file: &SourceFile) -> Vec<Token> {
    let stream = TokenStream::from_str(&file.text)
        .unwrap_or_else(|error| panic!("{} is no Rust source: {error}", file.path));
    let mut flat = Vec::new();
    flatten(stream, &mut flat);
    flat
}

fn flatten(stream: TokenStream, flat: &mut Vec<Token>) {
    for tree in stream {
        let line = tree.span().start().line;
        match tree {
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    proc_macro2::Delimiter::Parenthesis => ("(", ")"),
                    proc_macro2::Delimiter::Brace => ("{", "}"),
                    proc_macro2::Delimiter::Bracket => ("[", "]"),
                    proc_macro2::Delimiter::None => ("", ""),
                };
                flat.push(Token {
                    text: open.to_owned(),
                    line,
                });
                flatten(group.stream(), flat);
                flat.push(Token {
                    text: close.to_owned(),
                    line: group.span_close().start().line,
                });
            }
            other => flat.push(Token {
                text: other.to_string(),
                line,
            }),
        }
    }
}

/// Ends a test with every breach of a rule, each on a line of its own, and what to do about them.
///
/// # Panics
///
/// If there is a breach: that is how a rule fails.
pub fn assert_none(breaches: &[String], advice: &str) {
    assert!(
        breaches.is_empty(),
        "\n{}\n\n{advice}\n",
        breaches.join("\n")
    );
}
