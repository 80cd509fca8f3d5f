//! Where the Python side lives. Asked once per server, when the first Python model is registered:
//! it takes an interpreter start of about 0.1 s, and a server without Python models needs none.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};
use serde::Deserialize;
use ts_wire::frame::PythonPlaces;

use crate::config::HostConfig;
use crate::pool::children::Children;

/// File name of the plugin, next to the executable.
const PLUGIN_FILE: &str = "libts_plugin.so";

/// How long the interpreter may take to answer; it takes some 0.1 s.
const ANSWERS_WITHIN: Duration = Duration::from_secs(30);

/// Prints what [`Answer`] reads. Uses the standard library only: importing torch takes seconds.
const QUESTION: &str = r#"
import importlib.metadata, importlib.util, json, os, sys, sysconfig
shared = sysconfig.get_config_var("Py_ENABLE_SHARED")
libdir, name = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
candidates = [os.path.join(d, name) for d in (libdir, sysconfig.get_config_var("LIBPL")) if d and name]
torch = importlib.util.find_spec("torch")
try:
    torch_version = importlib.metadata.version("torch").split("+")[0]
except importlib.metadata.PackageNotFoundError:
    torch_version = None
print(json.dumps({
    "version": "%d.%d" % sys.version_info[:2],
    "prefix": sys.prefix,
    "libpython": next((c for c in candidates if os.path.exists(c)), None) if shared else None,
    "torch_lib": os.path.join(os.path.dirname(torch.origin), "lib") if torch and torch.origin else None,
    "torch_version": torch_version,
}))
"#;

#[derive(Debug, Deserialize)]
struct Answer {
    version: String,
    prefix: PathBuf,
    libpython: Option<PathBuf>,
    torch_lib: Option<PathBuf>,
    torch_version: Option<String>,
}

/// Why Python handlers cannot run.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum PythonError {
    #[error(
        "no Python interpreter was found. Looked at {looked}; set `python` in the configuration"
    )]
    InterpreterMissing { looked: String },
    #[error("`{executable}` could not be asked where it lives: {reason}")]
    Unanswered { executable: PathBuf, reason: String },
    #[error(
        "`{executable}` (Python {version}) has no shared libpython, which embedding needs. Install \
         one, for example Debian's `libpython{version}` or a Python built with `--enable-shared`"
    )]
    NotShared {
        executable: PathBuf,
        version: String,
    },
    #[error("the plugin `{file}` was not found in {looked}. Build it with `make build`")]
    PluginMissing { file: &'static str, looked: String },
    #[error(
        "the Python package `ts` was not found. Looked at {looked}; set `model_server_home` in the configuration"
    )]
    PackageMissing { looked: String },
}

/// Finds interpreter, libpython, torch, the plugin and the `ts` package.
pub(crate) fn find(
    config: &HostConfig,
    children: &Arc<Children>,
) -> Result<PythonPlaces, PythonError> {
    let server = config.executable.as_path();
    let executable = interpreter(config.python.as_deref(), server)?;
    let answer = ask(&executable, children)?;
    let Some(libpython) = answer.libpython else {
        return Err(PythonError::NotShared {
            executable,
            version: answer.version,
        });
    };
    let folder = server.parent().unwrap_or(Path::new("."));
    let plugin = [
        folder.join(PLUGIN_FILE),
        folder.join("../lib/flambeau").join(PLUGIN_FILE),
    ]
    .into_iter()
    .find(|path| path.is_file())
    .ok_or_else(|| PythonError::PluginMissing {
        file: PLUGIN_FILE,
        looked: folder.display().to_string(),
    })?;
    // What the operator set, else beside the server, else beside the environment, as in a checkout
    // that is built elsewhere.
    let packages: Vec<PathBuf> = match &config.home {
        Some(home) => vec![home.clone()],
        None => above(server)
            .flat_map(|folder| [folder.join("handlers"), folder.join("lib/flambeau")])
            .chain(answer.prefix.parent().map(|folder| folder.join("handlers")))
            .collect(),
    };
    let handlers = packages
        .iter()
        .find(|path| path.join("ts/_runtime/bridge.py").is_file())
        .ok_or_else(|| PythonError::PackageMissing {
            looked: listed(&packages),
        })?;
    Ok(PythonPlaces {
        plugin,
        executable,
        prefix: answer.prefix,
        libpython,
        torch_lib: answer.torch_lib,
        torch_version: answer.torch_version,
        handlers: handlers.clone(),
    })
}

/// The configured one; else that of the active virtual environment; else a `.venv` beside or above
/// the server, as in a checkout; else the path's.
fn interpreter(configured: Option<&Path>, server: &Path) -> Result<PathBuf, PythonError> {
    if let Some(path) = configured {
        return if path.is_file() {
            Ok(path.to_owned())
        } else {
            Err(PythonError::InterpreterMissing {
                looked: format!("`{}`", path.display()),
            })
        };
    }
    let mut candidates = Vec::new();
    candidates.extend(
        std::env::var_os("VIRTUAL_ENV").map(|folder| Path::new(&folder).join("bin/python")),
    );
    candidates.extend(above(server).map(|folder| folder.join(".venv/bin/python")));
    let path = std::env::var_os("PATH").unwrap_or_default();
    candidates.extend(std::env::split_paths(&path).map(|folder| folder.join("python3")));
    candidates
        .iter()
        .find(|path| path.is_file())
        .cloned()
        .ok_or_else(|| PythonError::InterpreterMissing {
            looked: listed(&candidates),
        })
}

fn above(server: &Path) -> impl Iterator<Item = &Path> {
    server.ancestors().skip(1).take(5)
}

fn listed(paths: &[PathBuf]) -> String {
    let shown: Vec<String> = paths
        .iter()
        .map(|path| format!("`{}`", path.display()))
        .collect();
    shown.join(", ")
}

fn ask(executable: &Path, children: &Arc<Children>) -> Result<Answer, PythonError> {
    let no_answer = |reason: String| PythonError::Unanswered {
        executable: executable.to_owned(),
        reason,
    };
    let mut command = Command::new(executable);
    command
        .args(["-I", "-c", QUESTION])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // Ours for as long as it is waited for here.
    let (mut child, _known) = children
        .spawn(&mut command)
        .map_err(|error| no_answer(error.to_string()))?;
    // Its answer fits into a pipe, so it need not be read before the end.
    if !ends_within(&child, ANSWERS_WITHIN) {
        let _already_gone = child.kill();
        let _reaped = child.wait();
        let limit = ANSWERS_WITHIN.as_secs();
        return Err(no_answer(format!("no answer within {limit} s")));
    }
    let output = child
        .wait_with_output()
        .map_err(|error| no_answer(error.to_string()))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        return Err(no_answer(
            words.lines().last().unwrap_or("it failed").to_owned(),
        ));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| no_answer(error.to_string()))
}

fn ends_within(child: &Child, limit: Duration) -> bool {
    let pid = Pid::from_child(child);
    let Ok(pidfd) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else {
        return false;
    };
    let limit = Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: 0,
    };
    loop {
        match poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit)) {
            Err(Errno::INTR) => {}
            ended => return ended.is_ok_and(|ready| ready > 0),
        }
    }
}
