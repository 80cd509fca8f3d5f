//! Documents in step with the repository: commands that exist, links that lead somewhere, nothing
//! that only works on its author's machine.

use std::collections::BTreeSet;

use ts_house::{assert_none, files, read, root};

/// The targets of the Makefile.
fn targets() -> BTreeSet<String> {
    let is_name = |name: &str| name.chars().all(|c| c.is_ascii_lowercase() || c == '-');
    read("Makefile")
        .lines()
        .filter(|line| !line.starts_with(['\t', '.', '#', ' ']))
        .filter_map(|line| line.split_once(':').map(|(name, _)| name.to_owned()))
        .filter(|name| !name.is_empty() && is_name(name))
        .collect()
}

/// The code in a Markdown text: the lines of its fenced blocks and its inline spans.
fn code(markdown: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut fenced = false;
    for line in markdown.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if fenced {
            found.push(line);
        } else {
            found.extend(line.split('`').skip(1).step_by(2));
        }
    }
    found
}

#[test]
fn every_documented_make_target_exists() {
    let targets = targets();
    let mut seen = 0;
    let mut breaches = Vec::new();
    for file in files(&[".md"]) {
        for text in code(&file.text) {
            // What follows `make`, up to the next command or a comment.
            let command = text.trim_start().trim_start_matches("$ ");
            let Some(words) = command.strip_prefix("make ") else {
                continue;
            };
            for target in words
                .split_whitespace()
                .take_while(|word| !matches!(*word, "#" | "&&" | ";" | "|"))
                .filter(|word| !word.starts_with('-') && !word.contains('='))
            {
                seen += 1;
                if !targets.contains(target) {
                    breaches.push(format!("{}: `make {target}` is no target", file.path));
                }
            }
        }
    }
    assert!(seen > 0, "no document says how to build or test");
    assert_none(
        &breaches,
        "Name a target that `make help` lists, or add it to the Makefile.",
    );
}

#[test]
fn ci_calls_targets_that_exist() {
    let targets = targets();
    let called: Vec<String> = read(".ci/run")
        .lines()
        .filter_map(|line| line.split_once("make ").filter(|_| !line.starts_with('#')))
        .flat_map(|(_, words)| {
            words
                .split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .collect();
    for needed in ["check", "test"] {
        assert!(
            called.iter().any(|target| target == needed),
            ".ci/run does not `make {needed}`"
        );
    }
    let breaches: Vec<String> = called
        .iter()
        .filter(|target| !targets.contains(*target))
        .map(|target| format!(".ci/run: `make {target}` is no target"))
        .collect();
    assert_none(
        &breaches,
        "CI runs what a developer runs: call a target of the Makefile.",
    );
}

#[test]
fn links_in_documents_lead_somewhere() {
    let mut breaches = Vec::new();
    for file in files(&[".md"]) {
        let folder = root()
            .join(&file.path)
            .parent()
            .map(ToOwned::to_owned)
            .unwrap_or_default();
        for link in file
            .text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next())
        {
            let target = link.split('#').next().unwrap_or_default();
            if !target.is_empty() && !target.contains("://") && !folder.join(target).exists() {
                breaches.push(format!("{}: `{link}` leads nowhere", file.path));
            }
        }
    }
    assert_none(
        &breaches,
        "Link to a file by its path relative to the document.",
    );
}

#[test]
fn no_file_names_a_path_of_one_machine() {
    // Folders in which only one person's or one machine's files lie. In pieces, since this file is
    // read as well.
    let personal: Vec<String> = ["home", "Users", "root", "work"]
        .iter()
        .map(|folder| ["/", folder, "/"].concat())
        .collect();
    // The user of TorchServe's container image, whose folders people mount.
    let known = ["/", "home", "/model-server"].concat();
    let mut breaches = Vec::new();
    for file in files(&[
        ".md",
        ".rs",
        ".py",
        ".sh",
        ".toml",
        ".properties",
        ".example",
        "Makefile",
    ]) {
        for (index, line) in file.text.lines().enumerate() {
            for folder in &personal {
                for (at, _) in line.match_indices(folder.as_str()) {
                    // `$ROOT/work/` and `https://host/work/` are no absolute paths.
                    let absolute = line[..at].chars().next_back().is_none_or(|before| {
                        before.is_whitespace() || "`'\"(=:<,".contains(before)
                    });
                    if absolute && !line[at..].starts_with(&known) {
                        breaches.push(format!("{}:{}: {}", file.path, index + 1, line.trim()));
                    }
                }
            }
        }
    }
    assert_none(
        &breaches,
        "Write the path relative to the repository, or name what it stands for.",
    );
}

#[test]
fn the_readme_fits_on_one_screen() {
    let lines = read("README.md").lines().count();
    assert!(
        lines <= 70,
        "README.md has {lines} lines, more than 70. Move detail to docs/ and link to it."
    );
}
