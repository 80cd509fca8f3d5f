//! Asks the Python that the plugin is built for which versions it and its torch have. The plugin
//! carries both as constants: `torch` compares them with what tch expects when it is compiled,
//! `interpreter` with what a host finds when it starts.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// Prints `<Python's major.minor> <torch's version without its build suffix>`, without the two
/// seconds of `import torch`.
const PRINT_VERSIONS: &str = "
import sys, importlib.metadata
print('%d.%d' % sys.version_info[:2], importlib.metadata.version('torch').partition('+')[0])
";

const WHAT_TO_SET: &str =
    "set PYO3_PYTHON to the interpreter of an environment with torch installed";

fn main() -> ExitCode {
    for name in ["PYO3_PYTHON", "VIRTUAL_ENV", "PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    println!("cargo::rerun-if-changed=build.rs");
    match versions() {
        Ok((python, torch)) => {
            println!("cargo::rustc-env=TS_BUILT_FOR_PYTHON={python}");
            println!("cargo::rustc-env=TS_BUILT_FOR_TORCH={torch}");
            // For the tests, which run hosts with the same Python.
            println!("cargo::rustc-env=TS_BUILT_WITH={}", interpreter().display());
            ExitCode::SUCCESS
        }
        Err(reason) => {
            println!("cargo::error={reason}; {WHAT_TO_SET}");
            ExitCode::FAILURE
        }
    }
}

fn versions() -> Result<(String, String), String> {
    let python = interpreter();
    let shown = python.display();
    let output = Command::new(&python)
        .args(["-c", PRINT_VERSIONS])
        .output()
        .map_err(|error| format!("`{shown}` could not be run: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    match text.split_whitespace().collect::<Vec<_>>()[..] {
        [python, torch] => Ok((python.to_owned(), torch.to_owned())),
        _ => {
            let errors = String::from_utf8_lossy(&output.stderr);
            let reason = errors.lines().last().unwrap_or("it printed no versions");
            Err(format!("`{shown}` has no usable torch: {reason}"))
        }
    }
}

/// The interpreter that the build of pyo3 takes.
fn interpreter() -> PathBuf {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    variable("PYO3_PYTHON")
        .or_else(|| variable("VIRTUAL_ENV").map(|folder| folder.join("bin/python")))
        .unwrap_or_else(|| PathBuf::from("python3"))
}
