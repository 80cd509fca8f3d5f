//! Requirement lists: plain requirements only.
//!
//! The list comes with the model and is given to the installer, whose options could point it at
//! another package index or at files of the server. Options belong to the operator.

use std::path::Path;

use fs_err as fs;

use crate::error::{ArchiveError, Doing};

/// Every line of the list at `path` that is refused; empty when it may be installed.
///
/// # Errors
/// When the file cannot be read.
pub fn check_requirements(path: &Path) -> Result<Vec<ArchiveError>, ArchiveError> {
    let bytes = fs::read(path).doing("read", path)?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(logical_lines(&text)
        .into_iter()
        .filter_map(|(at_line, line)| {
            let reason = fault(&line)?;
            Some(ArchiveError::RequirementRefused {
                path: path.to_owned(),
                at_line,
                reason,
            })
        })
        .collect())
}

/// Lines with their numbers; one that ends in `\` goes on in the next, as for the installer.
fn logical_lines(text: &str) -> Vec<(usize, String)> {
    let mut lines: Vec<(usize, String)> = Vec::new();
    let mut continues = false;
    for (index, line) in text.trim_start_matches('\u{feff}').lines().enumerate() {
        let (body, more) = line
            .strip_suffix('\\')
            .map_or((line, false), |body| (body, true));
        match lines.last_mut() {
            Some((_, text)) if continues => text.push_str(body),
            _ => lines.push((index + 1, body.to_owned())),
        }
        continues = more;
    }
    lines
}

fn fault(line: &str) -> Option<String> {
    let line = line.trim();
    if line.starts_with('-') {
        let option: String = line
            .chars()
            .take_while(|c| !c.is_whitespace() && *c != '=')
            .collect();
        return Some(format!(
            "`{}` is an installer option; only requirements may be listed, options are set by the \
             operator",
            crate::error::escaped(&option)
        ));
    }
    let name: String = line
        .chars()
        .take_while(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        .collect();
    (name.eq_ignore_ascii_case("ts")).then(|| {
        "a package `ts` would hide the server's own Python package of that name; leave it out"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("requirements.txt");
        fs::write(&path, text).unwrap();
        check_requirements(&path)
            .unwrap()
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn plain_requirements_pass() {
        let list = "# comment\n\nnumpy==1.26\ntransformers[torch]>=4 ; python_version > '3.8'\n\
                    ./wheels/own-1.0-py3-none-any.whl\npkg==1 \\\n  --hash=sha256:00\ntsx\n";
        assert_eq!(refused(list), Vec::<String>::new());
    }

    #[test]
    fn options_and_the_servers_own_package_are_refused_with_their_line() {
        let list =
            "numpy\n--index-url http://evil\n -e .\n-r other.txt\nTS==1\nts[all]\n\\\n-i x\n";
        let refused = refused(list);
        assert_eq!(refused.len(), 6, "{refused:#?}");
        assert!(refused[0].contains("line 2") && refused[0].contains("`--index-url`"));
        assert!(refused[3].contains("line 5") && refused[3].contains("`ts`"));
        assert!(refused[5].contains("line 7"), "{}", refused[5]);
    }
}
