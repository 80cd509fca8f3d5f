//! The server's side of a host, as far as the tests need it.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use ts_wire::frame::{
    BackendKind, BatchOutcome, ControlRequest, EchoBehaviour, Exchange, HostReply, HostSetup,
    ItemOutcome, LoadFailure, LoadModel, MetricKind, PythonPlaces, RunBatch, RunFailure, RunItem,
    RunPart, SequenceHeaders, WorkerReply, WorkerRequest,
};
use ts_wire::{Channel, Departures, Incoming, WireError};

const LIMIT: u64 = 1 << 30;

/// Threads that a worker's operators may use: a number that is nobody's default.
pub(crate) const INTRA_OP_THREADS: u32 = 3;

/// Asks the environment where its parts are, as the server does once at its start.
const PRINT_PLACES: &str = "
import importlib.metadata, importlib.util, os, sys, sysconfig
print(sys.prefix)
print(os.path.join(sysconfig.get_config_var('LIBDIR'), sysconfig.get_config_var('INSTSONAME')))
print(os.path.join(os.path.dirname(importlib.util.find_spec('torch').origin), 'lib'))
print(importlib.metadata.version('torch'))
";

/// The Python that the plugin was built with.
fn python() -> &'static Path {
    Path::new(env!("TS_BUILT_WITH"))
}

/// Where everything is that a host needs.
pub(crate) fn places() -> PythonPlaces {
    static FOUND: OnceLock<PythonPlaces> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            let output = Command::new(python())
                .args(["-c", PRINT_PLACES])
                .output()
                .unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let lines: Vec<&str> = text.lines().collect();
            let [prefix, libpython, torch_lib, torch_version] = lines[..] else {
                panic!("{} has no torch: {text}", python().display());
            };
            PythonPlaces {
                plugin: beside_the_tests("libts_plugin.so"),
                executable: python().to_owned(),
                prefix: prefix.into(),
                libpython: libpython.into(),
                torch_lib: Some(torch_lib.into()),
                torch_version: Some(torch_version.to_owned()),
                handlers: Path::new(env!("CARGO_MANIFEST_DIR"))
                    .join("../../handlers")
                    .canonicalize()
                    .unwrap(),
            }
        })
        .clone()
}

/// A file that Cargo built with this test, in the folder `deps`.
fn beside_the_tests(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().join(name)
}

/// A model whose handler is the module `handler`; its folder is kept as long as this value or a
/// host that was given it.
pub(crate) struct Model {
    pub(crate) dir: Arc<TempDir>,
    load: LoadModel,
}

/// A model with this source.
pub(crate) fn model(source: &str) -> Model {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let class = source.contains("class Handler");
    fs_err::write(dir.path().join("handler.py"), source).unwrap();
    let load = LoadModel {
        model_name: "a-model".to_owned(),
        model_version: "1.0".to_owned(),
        model_dir: dir.path().to_owned(),
        handler: if class {
            "handler.py"
        } else {
            "handler.py:handle"
        }
        .to_owned(),
        backend: BackendKind::Python,
        gpu_id: None,
        batch_size: 32,
        exchange: Exchange::Batches,
        service_envelope: None,
        limit_max_image_pixels: true,
        decode_input_request: false,
        load_policy: "any".to_owned(),
        intra_op_threads: INTRA_OP_THREADS,
        server_version: "0.1.0".to_owned(),
        sequence_headers: SequenceHeaders::default(),
        declared_metrics: Vec::new(),
        max_response_bytes: LIMIT,
        rank: 0,
        echo: EchoBehaviour::default(),
    };
    Model { dir, load }
}

/// A model without Python, run by the same host: what the rest costs.
pub(crate) fn echo_model() -> Model {
    let mut model = model("");
    model.load.backend = BackendKind::Echo;
    model
}

/// A host process; killed when dropped.
pub(crate) struct Host {
    child: Child,
    control: Mutex<Option<Channel>>,
    models: Mutex<Vec<Arc<TempDir>>>,
}

impl Host {
    /// A host that can take workers.
    pub(crate) fn ready(places: &PythonPlaces) -> Self {
        Self::start(places, &[], false).expect_ready()
    }

    /// Starts a host with more environment variables, or with these only.
    pub(crate) fn start(places: &PythonPlaces, variables: &[(&str, &OsStr)], only: bool) -> Self {
        let (ours, theirs) = Channel::pair().unwrap();
        let executable = beside_the_tests("../examples/model_host");
        let mut command = Command::new(&executable);
        if only {
            command.env_clear();
        }
        command.env("OMP_NUM_THREADS", "1");
        command.envs(variables.iter().copied());
        let child = command
            .stdin(Stdio::from(theirs))
            .spawn()
            .unwrap_or_else(|error| {
                panic!(
                    "{}: {error}; `cargo test -p ts-plugin` builds it, `--test host` alone does \
                     not",
                    executable.display()
                )
            });
        drop(command);
        let mut control = Channel::new(ours, LIMIT);
        let python = Some(places.clone());
        let setup = HostSetup {
            python,
            zygote: false,
        };
        control.send(&setup, None).unwrap();
        Self {
            child,
            control: Mutex::new(Some(control)),
            models: Mutex::default(),
        }
    }

    fn reply(&self) -> HostReply {
        let mut control = self.control.lock().unwrap();
        let control = control.as_mut().unwrap();
        let incoming = control.receive(soon());
        incoming.unwrap().header().unwrap()
    }

    /// Waits until the host is ready.
    pub(crate) fn expect_ready(self) -> Self {
        match self.reply() {
            HostReply::Ready => self,
            HostReply::Failed { message } => panic!("the host failed: {message}"),
        }
    }

    /// Waits until the host has failed and ended, and returns its words.
    pub(crate) fn expect_failed(mut self) -> String {
        let HostReply::Failed { message } = self.reply() else {
            panic!("the host started");
        };
        assert!(!self.wait(Duration::from_secs(10)).success());
        message
    }

    /// A worker with this model.
    pub(crate) fn worker(&self, model: &Model) -> Worker {
        self.try_worker(model)
            .unwrap_or_else(|failure| panic!("the model did not load: {failure}"))
    }

    /// A worker, or why it could not load the model.
    pub(crate) fn try_worker(&self, model: &Model) -> Result<Worker, LoadFailure> {
        self.models.lock().unwrap().push(Arc::clone(&model.dir));
        let (ours, theirs) = Channel::pair().unwrap();
        let mut control = self.control.lock().unwrap();
        let control = control.as_mut().unwrap();
        control
            .send(
                &ControlRequest::AddWorker { worker: 1 },
                Some(theirs.as_fd()),
            )
            .unwrap();
        drop(theirs);
        let mut channel = Channel::new(ours, LIMIT);
        let (departures, departed) = Departures::pair().unwrap();
        channel
            .send(
                &WorkerRequest::Load(Box::new(model.load.clone())),
                Some(departed.as_fd()),
            )
            .unwrap();
        drop(departed);
        let mut worker = Worker {
            channel,
            _departures: departures,
        };
        match worker.next().unwrap().header().unwrap() {
            WorkerReply::Loaded(_) => {}
            WorkerReply::LoadFailed(failure) => return Err(failure),
            _ => panic!("an answer to no question"),
        }
        Ok(worker)
    }

    /// Closes the control channel, as the end of the server does.
    pub(crate) fn close(&mut self) {
        *self.control.lock().unwrap() = None;
    }

    /// Waits for the process to end.
    pub(crate) fn wait(&mut self, limit: Duration) -> ExitStatus {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "the host runs on");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Processor time that it has used.
    pub(crate) fn cpu(&self) -> Duration {
        // From the scheduler's statistics of each thread: `stat` counts in ticks of 10 ms.
        let tasks = fs_err::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let nanoseconds = tasks.map(|task| -> u64 {
            let file = task.unwrap().path().join("schedstat");
            let text = fs_err::read_to_string(file).unwrap();
            text.split(' ').next().unwrap().parse().unwrap()
        });
        Duration::from_nanos(nanoseconds.sum())
    }

    /// Its memory, as the system counts it.
    pub(crate) fn memory(&self) -> String {
        let file = format!("/proc/{}/smaps_rollup", self.child.id());
        let text = fs_err::read_to_string(file).unwrap();
        text.lines()
            .filter(|line| {
                ["Rss:", "Private_Dirty:"]
                    .iter()
                    .any(|key| line.starts_with(key))
            })
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect::<Vec<_>>()
            .join(", ")
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _it_may_have_ended = self.child.kill();
        let _status = self.child.wait();
    }
}

/// The server's end of a worker's channel.
pub(crate) struct Worker {
    channel: Channel,
    _departures: Departures,
}

/// One answer.
#[derive(Debug, PartialEq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) reason: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    /// A header by its name.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }
}

/// A metric that came with an answer.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) kind: MetricKind,
    pub(crate) dimensions: Vec<(String, String)>,
}

type Answers = Vec<Result<Answer, RunFailure>>;

impl Worker {
    fn next(&mut self) -> Result<Incoming<'_>, WireError> {
        self.channel.receive(soon())
    }

    /// Sends a batch whose requests have one part each, `data`.
    pub(crate) fn send(&mut self, bodies: &[&[u8]]) {
        let ids: Vec<String> = (0..bodies.len())
            .map(|index| format!("id-{index}"))
            .collect();
        let items = ids.iter().zip(bodies).map(|(id, body)| RunItem {
            request_id: id,
            headers: vec![("content-type", "application/octet-stream")],
            parts: vec![RunPart {
                name: "data",
                content_type: "application/octet-stream",
                value_bytes: body.len() as u64,
            }],
        });
        let batch = WorkerRequest::Run(RunBatch {
            departures: false,
            items: items.collect(),
        });
        self.channel.send_payload(&batch, bodies).unwrap();
    }

    /// Waits for the answers to the batch; a failure of the batch is one of each request.
    pub(crate) fn receive(&mut self) -> Result<(Answers, Vec<Recorded>), WireError> {
        let incoming = self.next()?;
        let WorkerReply::Done(done) = incoming.header()? else {
            panic!("not an answer");
        };
        let metrics = done.metrics.iter().map(|metric| Recorded {
            name: metric.name.to_owned(),
            value: metric.value,
            kind: metric.kind,
            dimensions: owned(&metric.dimensions),
        });
        let mut rest = incoming.payload;
        let answers = match done.outcome {
            BatchOutcome::Failed(failure) => vec![Err(failure)],
            BatchOutcome::Items(items) => items
                .into_iter()
                .map(|item| match item {
                    ItemOutcome::Failed(failure) => Err(failure),
                    ItemOutcome::Reply(reply) => {
                        let (body, after) = rest.split_at(reply.body_bytes as usize);
                        rest = after;
                        Ok(Answer {
                            status: reply.status,
                            reason: reply.reason.to_owned(),
                            headers: owned(&reply.headers),
                            body: body.to_vec(),
                        })
                    }
                })
                .collect(),
        };
        Ok((answers, metrics.collect()))
    }

    /// Runs a batch.
    pub(crate) fn run(&mut self, bodies: &[&[u8]]) -> Result<Answers, WireError> {
        Ok(self.run_with_metrics(bodies)?.0)
    }

    /// Runs a batch and returns the metrics too.
    pub(crate) fn run_with_metrics(
        &mut self,
        bodies: &[&[u8]],
    ) -> Result<(Answers, Vec<Recorded>), WireError> {
        self.send(bodies);
        self.receive()
    }

    /// Runs one request.
    pub(crate) fn run_one(&mut self, body: &[u8]) -> Result<Answer, RunFailure> {
        self.run(&[body]).unwrap().remove(0)
    }

    /// Ends the worker and waits until its thread has let go of everything.
    pub(crate) fn stop(mut self) {
        self.channel.send(&WorkerRequest::Stop, None).unwrap();
        let ended = self.next().err();
        assert!(matches!(ended, Some(WireError::Closed)));
    }
}

fn owned(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    let pairs = pairs.iter();
    pairs
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(60))
}
