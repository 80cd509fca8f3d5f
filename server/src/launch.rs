//! Starting, in the foreground or the background, and stopping (*torchserve-contract* 1.2, 1.4,
//! 1.5). The server in force is the one whose number stands in the pid file.

use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal};

use crate::cli::{Command, Options};
use crate::settings::{
    Environment, Machine, Settings, SettingsError, VISIBLE, find_devices, load, raw::Raw, resolve,
    show,
};
use crate::snapshots::{Files, Restoring};
use crate::{app, arenas};

/// How long `--stop --foreground` waits.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// How long the folder of the pid file is waited for.
const LOCK_LIMIT: Duration = Duration::from_secs(1);

/// Times tried to make the pid file.
const ATTEMPTS: usize = 3;

/// Does what the command line asks for.
pub(crate) fn run(options: &Options) -> ExitCode {
    let environment = Environment::of_process();
    let pid_file = PidFile::new(&environment);
    if options.version {
        say(format_args!(
            "TorchServe Version is {}",
            env!("CARGO_PKG_VERSION")
        ));
        ExitCode::SUCCESS
    } else if options.command == Some(Command::Config) {
        show_settings(options, &environment)
    } else if options.stop {
        stop(&pid_file, options.foreground)
    } else {
        start(options, &environment, &pid_file)
    }
}

fn start(options: &Options, environment: &Environment, pid_file: &PidFile) -> ExitCode {
    let serves_here = options.foreground || options.detached;
    if serves_here {
        arenas::settle(environment);
    }
    if !options.detached {
        match pid_file.read() {
            Recorded::Server(_) => {
                say(format_args!(
                    "TorchServe is already running, please use torchserve --stop to stop \
                     TorchServe."
                ));
                return ExitCode::FAILURE;
            }
            // Written over once there is something to write.
            Recorded::Nothing { leftover: true } => {
                say(format_args!("Removing orphan pid file."));
            }
            Recorded::Nothing { leftover: false } | Recorded::Stranger => {}
        }
    }
    let Configured {
        raw,
        temp_dir,
        settings,
    } = configure(options, environment);
    let (settings, restoring) = match settings {
        Ok((settings, restoring)) => (settings, restoring),
        Err(faults) => {
            for fault in faults {
                say(format_args!("{fault}"));
            }
            return ExitCode::FAILURE;
        }
    };
    let started = if serves_here {
        let recorded = if options.detached {
            settle_in_background()
        } else {
            pid_file.write(process::id())
        };
        recorded.and_then(|()| {
            let ended = app::run(app::Plan {
                options,
                environment,
                raw: &raw,
                settings,
                restoring,
                snapshots: (!options.no_config_snapshots).then(|| Files::new(environment, &raw)),
                temp_dir,
                log_folders: environment.log_folders(),
            });
            pid_file.remove_own();
            ended
        })
    } else {
        detach(pid_file)
    };
    match started {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            hint(format_args!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// What was configured.
struct Configured {
    raw: Raw,
    temp_dir: PathBuf,
    /// What it means and which models come back, or every fault.
    settings: Result<(Settings, Restoring), Vec<SettingsError>>,
}

fn configure(options: &Options, environment: &Environment) -> Configured {
    let executable = match std::env::current_exe() {
        Ok(executable) => executable,
        // What the kernel calls it holds as long as the process does.
        Err(_) => PathBuf::from("/proc/self/exe"),
    };
    let machine = Machine {
        // The affinity and the quota of the control group are in it, and it is never 0.
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        devices: find_devices(Path::new("/proc/driver/nvidia/gpus"), Path::new("/dev")),
        visible_devices: environment.get(VISIBLE).map(str::to_owned),
        executable,
    };
    let mut raw = load(options, environment);
    let temp_dir = environment.temp_dir().unwrap_or_else(|fault| {
        raw.faults.push(fault);
        PathBuf::new()
    });
    let settings = resolve(&raw, &machine).and_then(|settings| {
        let restoring = Restoring::decide(&raw, &settings, options, environment)?;
        Ok((settings, restoring))
    });
    Configured {
        raw,
        temp_dir,
        settings,
    }
}

/// Prints the settings that a server would have.
fn show_settings(options: &Options, environment: &Environment) -> ExitCode {
    let Configured { raw, settings, .. } = configure(options, environment);
    let (notices, faults) = match settings {
        Ok((_, restoring)) => (restoring.notices, Vec::new()),
        Err(faults) => (raw.notices.clone(), faults),
    };
    if options.json {
        say(format_args!("{:#}", show::json(&raw, &notices, &faults)));
    } else {
        say(format_args!("{}", show::text(&raw, &notices, &faults)));
    }
    if faults.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Starts this executable again as a server of its own, and comes back at once.
fn detach(pid_file: &PidFile) -> anyhow::Result<()> {
    let mut child = process::Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .arg("--detached")
        .stdin(Stdio::piped())
        .spawn()?;
    let recorded = pid_file.write(child.id());
    if recorded.is_err() {
        // It could not be stopped by the command. It has not begun yet.
        let _gone = child.kill();
        let _reaped = child.wait();
    }
    // Closing the pipe lets it begin.
    recorded
}

/// Waits until the command that started this server has written the pid file, so that a server that
/// cannot start takes the file away after that and not before; and leaves the terminal.
fn settle_in_background() -> anyhow::Result<()> {
    let _ends_at_once = io::stdin().read_to_end(&mut Vec::new())?;
    let nothing = fs_err::File::open("/dev/null")?;
    rustix::stdio::dup2_stdin(&nothing)?;
    // Its own session: it outlives the terminal that started it.
    rustix::process::setsid()?;
    Ok(())
}

fn stop(pid_file: &PidFile, wait: bool) -> ExitCode {
    let Recorded::Server(pid) = pid_file.read() else {
        say(format_args!("TorchServe is not currently running."));
        // Apart from what scripts read: a server that was started with another `TMPDIR` has its
        // file elsewhere.
        hint(format_args!(
            "no running server is named in `{}`",
            pid_file.0.display()
        ));
        return ExitCode::SUCCESS;
    };
    if let Err(error) = rustix::process::kill_process(pid, Signal::TERM) {
        say(format_args!("TorchServe already stopped."));
        if error == rustix::io::Errno::PERM {
            let pid = pid.as_raw_nonzero();
            hint(format_args!(
                "process {pid} is a server of another user and goes on. That user can stop it"
            ));
        } else {
            pid_file.remove();
        }
        return ExitCode::SUCCESS;
    }
    // The tokens in it are worth nothing any more; that there are none is fine.
    let _may_not_exist = fs_err::remove_file(crate::auth::KEY_FILE);
    if wait {
        let deadline = Instant::now() + STOP_LIMIT;
        while is_server(pid) {
            if Instant::now() > deadline {
                say(format_args!("Stopping TorchServe took too long."));
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    } else {
        say(format_args!("TorchServe has stopped."));
    }
    pid_file.remove();
    ExitCode::SUCCESS
}

/// What the pid file says.
enum Recorded {
    /// No server; `leftover` when there is a file all the same.
    Nothing { leftover: bool },
    /// A process that is no server: its number was given out again. It is left alone.
    Stranger,
    /// A server.
    Server(Pid),
}

struct PidFile(PathBuf);

impl PidFile {
    fn new(environment: &Environment) -> Self {
        Self(environment.shared_temp_dir().join(".model_server.pid"))
    }

    fn read(&self) -> Recorded {
        let Ok(text) = fs_err::read_to_string(&self.0) else {
            return Recorded::Nothing { leftover: false };
        };
        let number = text.trim().parse().ok().filter(|pid| *pid > 0);
        let Some(pid) = number.and_then(Pid::from_raw) else {
            return Recorded::Nothing { leftover: true };
        };
        // A container that was killed starts again with the same few numbers: its own, or that of the
        // process 1 that looks after it, is what the last server left.
        let own = [Some(rustix::process::getpid()), rustix::process::getppid()];
        if own.contains(&Some(pid)) {
            Recorded::Nothing { leftover: true }
        } else if is_server(pid) {
            Recorded::Server(pid)
        } else if proc(pid, "").exists() {
            Recorded::Stranger
        } else {
            Recorded::Nothing { leftover: true }
        }
    }

    /// Makes the file, with its content, in one step: of two servers that start at once one has it.
    fn write(&self, pid: u32) -> anyhow::Result<()> {
        let told = format!(
            "the pid file cannot be written; `TMPDIR` names the folder that it lies in: `{}`",
            self.0.display()
        );
        // A leftover that two find is taken away once, and not what the first put in its place.
        let _alone = self.lock_folder();
        for _ in 0..ATTEMPTS {
            if self.create(pid).with_context(|| told.clone())? {
                return Ok(());
            }
            anyhow::ensure!(
                !matches!(self.read(), Recorded::Server(_)),
                "another server was started at the same time, and `{}` is its",
                self.0.display()
            );
            // A leftover, or a stranger's number.
            match fs_err::remove_file(&self.0) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(error).context(told);
                }
                _gone => {}
            }
        }
        anyhow::bail!("{told}: others write it all the time")
    }

    /// Held by whoever makes the file. Without it, where others keep it or the folder cannot be
    /// locked, only a leftover can still be taken for what it is not.
    fn lock_folder(&self) -> Option<fs_err::File> {
        let folder = fs_err::File::open(self.0.parent()?).ok()?;
        let deadline = Instant::now() + LOCK_LIMIT;
        while flock(&folder, FlockOperation::NonBlockingLockExclusive).is_err() {
            if Instant::now() > deadline {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(folder)
    }

    /// Returns whether there was none.
    fn create(&self, pid: u32) -> io::Result<bool> {
        let folder = self.0.parent().unwrap_or(&self.0);
        let readable = std::fs::Permissions::from_mode(0o644);
        let mut file = tempfile::Builder::new()
            .permissions(readable)
            .tempfile_in(folder)?;
        file.write_all(pid.to_string().as_bytes())?;
        match file.persist_noclobber(&self.0) {
            Ok(_) => Ok(true),
            Err(taken) if taken.error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(refused) => Err(refused.error),
        }
    }

    fn remove(&self) {
        // Another stop may have been faster.
        let _may_be_gone = fs_err::remove_file(&self.0);
    }

    /// Removes the file if it is about this process and not about one started since.
    fn remove_own(&self) {
        let own = process::id().to_string();
        if fs_err::read_to_string(&self.0).is_ok_and(|text| text.trim() == own) {
            self.remove();
        }
    }
}

fn proc(pid: Pid, entry: &str) -> PathBuf {
    Path::new("/proc")
        .join(pid.as_raw_nonzero().to_string())
        .join(entry)
}

/// Whether a process runs the server: this executable, or one of its name, and not as a host.
fn is_server(pid: Pid) -> bool {
    let Ok(command) = fs_err::read(proc(pid, "cmdline")) else {
        return false;
    };
    let mut arguments = command
        .split(|byte| *byte == 0)
        .filter(|argument| !argument.is_empty());
    let first = arguments.next();
    if arguments.next() == Some(b"worker") {
        return false;
    }
    let name = match fs_err::read_link(proc(pid, "exe")) {
        // Also of one that was started a moment ago and has no command line yet.
        Ok(executable) if std::env::current_exe().is_ok_and(|own| own == executable) => {
            return true;
        }
        Ok(executable) => executable
            .file_name()
            .map(|name| name.to_string_lossy().into_owned()),
        // Another user's process: only its command line is open to us. One that has ended and was
        // not waited for has none.
        Err(_) => first.and_then(|first| {
            let name = String::from_utf8_lossy(first);
            name.rsplit('/').next().map(str::to_owned)
        }),
    };
    // The kernel marks an executable that was replaced since.
    name.is_some_and(|name| name.trim_end_matches(" (deleted)") == "torchserve")
}

/// A line of what scripts around TorchServe read from standard output.
fn say(line: std::fmt::Arguments<'_>) {
    // Whoever closed the pipe does not want to know.
    let _closed = writeln!(io::stdout(), "{line}");
}

/// A line for people.
fn hint(line: std::fmt::Arguments<'_>) {
    let _closed = writeln!(io::stderr(), "torchserve: {line}");
}
