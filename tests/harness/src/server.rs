//! The server as a child process.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::client::Request;

/// How long anything here may take before the test fails.
const LIMIT: Duration = Duration::from_secs(60);

/// A server that has not been started.
#[derive(Clone)]
pub struct Server {
    executable: PathBuf,
    folder: Arc<TempDir>,
    config: Vec<String>,
    config_named: bool,
    snapshots: bool,
    args: Vec<String>,
    environment: Vec<(String, String)>,
    trusted: Option<Arc<[u8]>>,
}

impl Server {
    /// A server with an empty model store, free ports, no tokens and the model API on.
    pub fn new(executable: &str) -> Self {
        let folder = tempfile::Builder::new()
            .prefix("ts-test-")
            .tempdir()
            .unwrap();
        fs_err::create_dir_all(folder.path().join("store")).unwrap();
        fs_err::create_dir_all(folder.path().join("tmp")).unwrap();
        Self {
            executable: executable.into(),
            folder: Arc::new(folder),
            config_named: true,
            snapshots: false,
            config: addresses("http"),
            args: vec![
                "--disable-token-auth".to_owned(),
                "--enable-model-api".to_owned(),
            ],
            environment: Vec::new(),
            trusted: None,
        }
    }

    /// Lets all its listeners speak TLS.
    #[must_use]
    pub fn https(mut self) -> Self {
        self.config.splice(..3, addresses("https"));
        self
    }

    /// Lets its clients believe what this authority, a certificate in DER, vouches for.
    #[must_use]
    pub fn trusting(mut self, authority: &[u8]) -> Self {
        self.trusted = Some(authority.into());
        self
    }

    /// Adds a line to its configuration file.
    #[must_use]
    pub fn config(mut self, line: &str) -> Self {
        self.config.push(line.to_owned());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|arg| (*arg).to_owned()));
        self
    }

    /// Lets it write and read snapshots. Its configuration file lies in its folder and is not named.
    #[must_use]
    pub fn snapshots(mut self) -> Self {
        self.snapshots = true;
        self.config_named = false;
        self
    }

    /// Names its configuration file all the same.
    #[must_use]
    pub fn named_config(mut self) -> Self {
        self.config_named = true;
        self
    }

    /// Leaves tokens and the model API at their defaults.
    #[must_use]
    pub fn with_default_safety(mut self) -> Self {
        self.args.clear();
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Its model store.
    pub fn store(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    /// Puts a model for the echo backend into the store; `yaml` is its `model-config.yaml`.
    #[must_use]
    pub fn echo_model(self, name: &str, yaml: &str) -> Self {
        write_echo_model(&self.store(), name, "1.0", yaml);
        self
    }

    /// Puts an echo model into a folder of the store whose name is not the model's.
    #[must_use]
    pub fn echo_folder(self, folder: &str, model: &str, version: &str) -> Self {
        let yaml = "minWorkers: 1\nmaxWorkers: 1";
        write_echo_folder(&self.store().join(folder), model, version, yaml);
        self
    }

    /// The folder that it is started in; its temporary files are in `tmp` there.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Its configuration file.
    pub fn config_file(&self) -> PathBuf {
        self.folder.path().join("config.properties")
    }

    /// In one step: another start may be reading it.
    fn write_config(&self) {
        let file = tempfile::NamedTempFile::new_in(self.folder.path()).unwrap();
        fs_err::write(file.path(), self.config.join("\n")).unwrap();
        file.persist(self.config_file()).unwrap();
    }

    /// The command in this server's folder and environment, without any argument.
    fn bare_command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command
            .current_dir(self.folder.path())
            .env("TMPDIR", self.folder.path().join("tmp"))
            .env_remove("TS_CONFIG_FILE")
            .env_remove("TEMP")
            .env_remove("LOG_LOCATION")
            .env_remove("METRICS_LOCATION")
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn command(&self, how: &[&str]) -> Command {
        let mut command = self.bare_command();
        command
            .args(how)
            .args((!self.snapshots).then_some("--ncs"))
            .arg("--model-store")
            .arg(self.store());
        if self.config_named {
            command.arg("--ts-config").arg(self.config_file());
        }
        command
            .arg("--ready-file")
            .arg(self.folder.path().join("ready.json"))
            .args(&self.args);
        command
    }

    /// Runs the command with these arguments alone, where its configuration file lies.
    pub fn run(&self, args: &[&str]) -> Ran {
        self.write_config();
        Ran::of(self.bare_command().args(args))
    }

    /// Starts it as scripts do, without `--foreground`: the command ends, the server stays.
    pub fn start_in_background(&self) -> Background {
        self.write_config();
        let mut launcher = self.command(&["--start"]).spawn().unwrap();
        let output = Arc::new(Mutex::new(String::new()));
        let open = Arc::new(AtomicUsize::new(2));
        collect(launcher.stdout.take().unwrap(), &output, &open);
        collect(launcher.stderr.take().unwrap(), &output, &open);
        let status = launcher.wait().unwrap();
        Background {
            code: status.code(),
            output,
            open,
        }
    }

    /// Starts it and waits until it listens.
    pub fn start(self) -> Running {
        self.write_config();
        let ready_file = self.folder.path().join("ready.json");
        // Of an earlier start here.
        let _may_not_exist = fs_err::remove_file(&ready_file);
        let mut child = self.command(&["--start", "--foreground"]).spawn().unwrap();
        let output = Arc::new(Mutex::new(String::new()));
        let open = Arc::new(AtomicUsize::new(2));
        collect(child.stdout.take().unwrap(), &output, &open);
        collect(child.stderr.take().unwrap(), &output, &open);
        let started = Instant::now();
        let ready: Value = loop {
            if let Ok(text) = fs_err::read_to_string(&ready_file) {
                break serde_json::from_str(&text).unwrap();
            }
            if let Some(status) = child.try_wait().unwrap() {
                std::thread::sleep(Duration::from_millis(100));
                panic!(
                    "the server ended with {status}:\n{}",
                    output.lock().unwrap()
                );
            }
            assert!(
                started.elapsed() < LIMIT,
                "not ready:\n{}",
                output.lock().unwrap()
            );
            std::thread::sleep(Duration::from_millis(2));
        };
        let address = |key: &str| ready["urls"][key].as_str().unwrap_or_default().to_owned();
        Running {
            inference: address("inference"),
            management: address("management"),
            metrics: address("metrics"),
            child,
            server: self,
            output,
        }
    }

    /// Starts it, and sends it a signal so long after, however far it has come by then.
    pub fn start_and_signal(self, after: Duration, signal: rustix::process::Signal) {
        let mut child = self
            .command(&["--start", "--foreground"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(after);
        rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
        child.wait().unwrap();
    }

    /// Starts it where a start must fail; returns its status and all its output.
    pub fn start_and_fail(self) -> (ExitStatus, String) {
        self.write_config();
        let output = self.command(&["--start", "--foreground"]).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status, String::from_utf8_lossy(&text).into_owned())
    }
}

/// What a command that ended has left.
#[derive(Debug)]
pub struct Ran {
    /// Its exit code; none if a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Ran {
    fn of(command: &mut Command) -> Self {
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self {
            code: output.status.code(),
            stdout: text(&output.stdout),
            stderr: text(&output.stderr),
        }
    }
}

/// A server that was started and left. `Server::run(&["--stop"])` ends it.
pub struct Background {
    /// Exit code of the command that started it.
    pub code: Option<i32>,
    output: Arc<Mutex<String>>,
    open: Arc<AtomicUsize>,
}

impl Background {
    /// What has come out of the pipes that the command was started with.
    pub fn output(&self) -> String {
        self.output.lock().unwrap().clone()
    }

    /// Waits until a text has come.
    #[track_caller]
    pub fn wait_for(&self, text: &str) {
        self.wait(text, || self.output().contains(text));
    }

    /// Waits until nobody holds the pipes any more.
    #[track_caller]
    pub fn wait_for_end(&self) -> String {
        self.wait("the end of the output", || {
            self.open.load(Ordering::Acquire) == 0
        });
        self.output()
    }

    #[track_caller]
    fn wait(&self, what: &str, holds: impl Fn() -> bool) {
        poll(what, holds, || self.output());
    }
}

fn addresses(scheme: &str) -> Vec<String> {
    ["inference_address", "management_address", "metrics_address"]
        .map(|key| format!("{key}={scheme}://127.0.0.1:0"))
        .to_vec()
}

fn write_echo_model(store: &Path, name: &str, version: &str, yaml: &str) {
    write_echo_folder(&store.join(name), name, version, yaml);
}

fn write_echo_folder(model_folder: &Path, name: &str, version: &str, yaml: &str) {
    let folder = model_folder.join("MAR-INF");
    fs_err::create_dir_all(&folder).unwrap();
    let mut model = serde_json::json!({"modelName": name, "modelVersion": version});
    if !yaml.is_empty() {
        model["configFile"] = "model-config.yaml".into();
        fs_err::write(model_folder.join("model-config.yaml"), yaml).unwrap();
    }
    let manifest = serde_json::json!({"runtime": "echo", "model": model});
    fs_err::write(folder.join("MANIFEST.json"), manifest.to_string()).unwrap();
}

/// Waits until a condition holds; `output` is shown if it never does.
#[track_caller]
fn poll(what: &str, holds: impl Fn() -> bool, output: impl Fn() -> String) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < LIMIT, "never: {what}\n{}", output());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Gathers what comes out of a pipe; `open` is one less when it has ended.
fn collect(
    pipe: impl std::io::Read + Send + 'static,
    output: &Arc<Mutex<String>>,
    open: &Arc<AtomicUsize>,
) {
    let (output, open) = (Arc::clone(output), Arc::clone(open));
    std::thread::Builder::new()
        .spawn(move || {
            for line in BufReader::new(pipe).split(b'\n') {
                let Ok(line) = line else { break };
                let mut output = output.lock().unwrap();
                output.push_str(&String::from_utf8_lossy(&line));
                output.push('\n');
            }
            open.fetch_sub(1, Ordering::AcqRel);
        })
        .unwrap();
}

/// A server that listens.
pub struct Running {
    /// Address of the inference API, as `http://host:port`, `https://host:port` or `unix:/path`.
    pub inference: String,
    /// Address of the management API.
    pub management: String,
    /// Address of the metrics API; empty where there is none.
    pub metrics: String,
    child: Child,
    server: Server,
    output: Arc<Mutex<String>>,
}

impl Running {
    /// A request to the inference API.
    pub fn infer(&self, method: &'static str, path: &str) -> Request {
        Request::new(method, format!("{}{path}", self.inference))
            .trusting(self.server.trusted.clone())
    }

    /// A request to the management API.
    pub fn manage(&self, method: &'static str, path: &str) -> Request {
        Request::new(method, format!("{}{path}", self.management))
            .trusting(self.server.trusted.clone())
    }

    /// A request to the metrics API.
    pub fn metrics(&self, path: &str) -> Request {
        Request::new("GET", format!("{}{path}", self.metrics)).trusting(self.server.trusted.clone())
    }

    /// Puts another echo model into the store; registers nothing.
    pub fn echo_model(&self, name: &str, version: &str, yaml: &str) {
        write_echo_model(&self.server.store(), name, version, yaml);
    }

    /// The folder that the server was started in.
    pub fn folder(&self) -> &Path {
        self.server.folder.path()
    }

    /// The same server again, once this one is gone: `kill -9`, as a power cut would.
    #[track_caller]
    pub fn kill(mut self) -> Server {
        self.signal(rustix::process::Signal::KILL);
        self.wait_for_exit(LIMIT);
        self.server.clone()
    }

    /// The same server again, once this one has stopped in order.
    #[track_caller]
    pub fn stop_in_order(mut self) -> Server {
        let status = self.stop();
        assert!(status.success(), "{status}\n{}", self.output());
        self.server.clone()
    }

    /// The server's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything the server has written so far.
    pub fn output(&self) -> String {
        self.output.lock().unwrap().clone()
    }

    /// Describe-model's first entry.
    #[track_caller]
    pub fn describe(&self, model: &str) -> Value {
        self.manage("GET", &format!("/models/{model}"))
            .send()
            .expect(200)
            .json()[0]
            .clone()
    }

    /// Process ids of a model's workers, as far as they have one.
    pub fn worker_pids(&self, model: &str) -> Vec<u32> {
        let workers = self.describe(model)["workers"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        workers
            .iter()
            .filter_map(|worker| worker["pid"].as_u64())
            .filter_map(|pid| u32::try_from(pid).ok())
            .collect()
    }

    /// Process ids of the server's children: its model hosts. A host is a child of the thread that
    /// started it, so every thread is asked.
    pub fn children(&self) -> Vec<u32> {
        let Ok(tasks) = fs_err::read_dir(format!("/proc/{}/task", self.pid())) else {
            return Vec::new();
        };
        let lists = tasks.filter_map(|task| {
            // A thread may end meanwhile.
            fs_err::read_to_string(task.ok()?.path().join("children")).ok()
        });
        let pids = lists.flat_map(|list| {
            let pids = list.split_whitespace().map(|pid| pid.parse().unwrap());
            pids.collect::<Vec<u32>>()
        });
        pids.collect()
    }

    /// Waits until no model host is left.
    #[track_caller]
    pub fn wait_without_hosts(&self) {
        self.wait_until("no model host is left", || self.children().is_empty());
    }

    /// Waits until all workers of a model, at least one, take batches.
    #[track_caller]
    pub fn wait_ready(&self, model: &str) {
        self.wait_until(&format!("workers of {model} are ready"), || {
            let answer = self.manage("GET", &format!("/models/{model}")).send();
            if answer.status != 200 {
                return false;
            }
            let description = answer.json();
            let workers = description[0]["workers"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            !workers.is_empty() && workers.iter().all(|worker| worker["status"] == "READY")
        });
    }

    /// Waits until a condition holds.
    #[track_caller]
    pub fn wait_until(&self, what: &str, holds: impl Fn() -> bool) {
        poll(what, holds, || self.output());
    }

    /// Sends the server a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Waits for the server's end, at most `limit`.
    #[track_caller]
    pub fn wait_for_exit(&mut self, limit: Duration) -> ExitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(
                started.elapsed() < limit,
                "still running:\n{}",
                self.output()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Asks it to stop and waits until it has.
    #[track_caller]
    pub fn stop(&mut self) -> ExitStatus {
        self.signal(rustix::process::Signal::TERM);
        self.wait_for_exit(LIMIT)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _already_gone = self.child.kill();
        let _reaped_before = self.child.wait();
        if std::thread::panicking() {
            #[expect(clippy::print_stderr, reason = "shown beside a failed test")]
            {
                eprintln!("--- output of the server ---\n{}", self.output());
            }
        }
    }
}
