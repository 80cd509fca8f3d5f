//! Real hosts with real Python: each test starts a process, speaks to it as the server does, and
//! looks at what comes back. Hosts run the Python that the plugin was built with.

#![expect(
    clippy::unwrap_used,
    reason = "a step that fails ends its test; Clippy allows this in the test functions only"
)]

mod harness;

use std::time::{Duration, Instant};

use harness::{Answer, Host, INTRA_OP_THREADS, Model, Worker, model, places};
use ts_host::TORCH_VERSION;
use ts_wire::WireError;
use ts_wire::frame::{LoadFailureKind, MetricKind, RunFailure};

/// Answers with what it got: the value of the part `data`, and under two headers the id and the
/// content type that it saw. The context is the handler's own, so it must be the batch's.
const ECHO: &str = r#"
def handle(data, context):
    if data is None:
        return None
    for index in range(len(data)):
        context.set_response_header(index, "x-seen-id", context.get_request_id(index))
        context.set_response_header(
            index, "x-seen-type", str(context.get_request_header(index, "Content-Type"))
        )
    return [row.get("data") for row in data]
"#;

/// Runs the Python text that is sent to it, with `context` in reach.
const SCRIPT: &str = r#"
import os, signal, sys, threading, time
kept = threading.local()
def handle(data, context):
    if data is None:
        return None
    scope = globals() | {"context": context, "answer": None}
    exec(bytes(data[0]["data"]).decode(), scope)
    return scope["answer"]
"#;

fn text(answer: &Answer) -> String {
    String::from_utf8(answer.body.clone()).unwrap()
}

/// A host with one worker that runs the scripts it is sent.
fn scripted() -> (Host, Worker) {
    let host = Host::ready(&places());
    let worker = host.worker(&model(SCRIPT));
    (host, worker)
}

#[test]
fn a_batch_comes_back_in_order_with_headers_and_ids() {
    let host = Host::ready(&places());
    let mut worker = host.worker(&model(ECHO));
    let bodies: [&[u8]; 3] = [b"one", b"", "drei \u{1F525}".as_bytes()];
    let answers = worker.run(&bodies).unwrap();
    assert_eq!(answers.len(), 3);
    for (index, (answer, body)) in answers.iter().zip(bodies).enumerate() {
        let answer = answer.as_ref().unwrap();
        assert_eq!(answer.body, body);
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("x-seen-id"), Some(&*format!("id-{index}")));
        assert_eq!(
            answer.header("x-seen-type"),
            Some("application/octet-stream")
        );
    }
}

#[test]
fn bodies_of_every_size_arrive_as_sent() {
    let host = Host::ready(&places());
    let mut worker = host.worker(&model(ECHO));
    for size in [1, 4095, 4096, 65_535, 65_536, 70_000, 5 << 20, 12] {
        let body: Vec<u8> = (0..size).map(|at: usize| (at % 251) as u8).collect();
        // The echo is the request's `bytearray`; `bytes` take another way back.
        let answer = worker.run_one(&body).unwrap();
        assert!(answer.body == body, "echo of {size} bytes differs");
    }
    let mut scripted = host.worker(&model(SCRIPT));
    for size in [0, 1, 4095, 4096, 70_000, 5 << 20] {
        let script = format!("answer = [bytes(i % 251 for i in range({size}))]");
        let wanted: Vec<u8> = (0..size).map(|at: usize| (at % 251) as u8).collect();
        let answer = scripted.run_one(script.as_bytes()).unwrap();
        assert!(answer.body == wanted, "{size} bytes differ");
    }
}

#[test]
fn a_reply_keeps_its_bytes_when_the_handler_goes_on_with_them() {
    let (_host, mut worker) = scripted();
    let first = worker
        .run_one(b"kept.body = bytearray(b'a' * 9000); answer = [kept.body]")
        .unwrap();
    assert_eq!(first.body, vec![b'a'; 9000]);
    // Changes and shrinks the very object: it must not be exported any more.
    let second = worker
        .run_one(b"kept.body[:] = b'b'; answer = [kept.body]")
        .unwrap();
    assert_eq!(second.body, b"b");
}

#[test]
fn status_reason_and_headers_of_the_handler_arrive() {
    let (_host, mut worker) = scripted();
    let answer = worker
        .run_one(
            b"context.set_response_status(418, 'short and stout', 0)\n\
              context.set_response_header(0, 'x-caf\xC3\xA9', 'br\xC3\xBBl\xC3\xA9')\n\
              context.set_response_header(0, 'x-bad', 'a\\ud800b')\n\
              answer = ['tea']",
        )
        .unwrap();
    assert_eq!(answer.status, 418);
    assert_eq!(answer.reason, "short and stout");
    assert_eq!(answer.header("x-caf\u{e9}"), Some("br\u{fb}l\u{e9}"));
    assert_eq!(
        answer
            .header("x-bad")
            .map(|value| value.contains('\u{fffd}')),
        Some(true)
    );
    assert_eq!(answer.body, b"tea");
}

#[test]
fn failures_of_a_handler_are_told_apart_and_the_worker_goes_on() {
    let (_host, mut worker) = scripted();
    let cases: [(&str, RunFailure); 9] = [
        ("raise ValueError('no')", RunFailure::HandlerFailed),
        ("raise SystemExit(3)", RunFailure::HandlerFailed),
        ("raise KeyboardInterrupt", RunFailure::HandlerFailed),
        ("raise MemoryError", RunFailure::OutOfMemory),
        (
            "context.set_response_status(99999, '', 0)\nanswer = ['a']",
            RunFailure::HandlerFailed,
        ),
        ("answer = 'text'", RunFailure::NotAList),
        ("answer = ['a', 'b']", RunFailure::LengthMismatch),
        ("answer = [object()]", RunFailure::UnsupportedOutput),
        (
            "def down(n): return down(n + 1)\ndown(0)",
            RunFailure::HandlerFailed,
        ),
    ];
    for (script, failure) in cases {
        assert_eq!(worker.run_one(script.as_bytes()), Err(failure), "{script}");
    }
    let script = b"from ts.utils.util import PredictionException\n\
                   raise PredictionException('come later', 429)";
    assert_eq!(
        worker.run_one(script),
        Err(RunFailure::HandlerStatus {
            code: 429,
            message: "come later".to_owned()
        })
    );
    assert_eq!(text(&worker.run_one(b"answer = ['on']").unwrap()), "on");
}

/// Python counts calls, not bytes of stack: a sort inside a sort overflows the two MiB of a Rust
/// thread long before the limit on recursion is reached.
#[test]
fn deep_recursion_through_native_code_is_an_error_and_not_a_crash() {
    let (_host, mut worker) = scripted();
    let script = b"def deep(x): return sorted([x, x], key=deep)\ndeep(1)";
    assert_eq!(worker.run_one(script), Err(RunFailure::HandlerFailed));
    assert_eq!(text(&worker.run_one(b"answer = ['on']").unwrap()), "on");
}

#[test]
fn metrics_of_a_handler_arrive_with_their_kind() {
    let (_host, mut worker) = scripted();
    let script = b"context.metrics.add_counter('Drops', 2)\n\
                   context.metrics.add_size('Weight', 1.5, unit='MB')\n\
                   answer = ['']";
    let metrics = worker.run_with_metrics(&[script]).unwrap().1;
    let found = |name: &str| metrics.iter().find(|metric| metric.name == name).unwrap();
    assert_eq!(found("Drops").value, 2.0);
    assert_eq!(found("Drops").kind, MetricKind::Counter);
    assert_eq!(found("Weight").value, 1.5);
    assert_eq!(found("Weight").kind, MetricKind::Gauge);
    let model = ("ModelName".to_owned(), "a-model".to_owned());
    assert!(found("PredictionTime").dimensions.contains(&model));
}

#[test]
fn a_model_that_cannot_load_says_whether_to_try_again() {
    let cases = [
        ("import not_there", LoadFailureKind::Permanent, "not_there"),
        ("def handle(:", LoadFailureKind::Permanent, "SyntaxError"),
        (
            "def handle(data, context): raise OSError('disk is away')",
            LoadFailureKind::Transient,
            "disk is away",
        ),
        (
            "def handle(data, context): raise MemoryError",
            LoadFailureKind::OutOfMemory,
            "MemoryError",
        ),
    ];
    for (source, kind, words) in cases {
        let host = Host::ready(&places());
        let failure = host.try_worker(&model(source)).err().unwrap();
        assert_eq!(failure.kind, kind, "{source}: {failure}");
        assert!(failure.message.contains(words), "{source}: {failure}");
        assert!(!failure.message.contains('\n'), "{failure}");
    }
}

#[test]
fn a_failed_load_can_be_tried_again_in_the_same_host() {
    let host = Host::ready(&places());
    let model = model(
        "
tries = 0
def handle(data, context):
    global tries
    tries += 1
    if tries == 1:
        raise OSError('disk is away')
    return [b'on'] * len(data or [])
",
    );
    assert!(host.try_worker(&model).is_err());
    assert_eq!(text(&host.worker(&model).run_one(b"").unwrap()), "on");
}

#[test]
fn a_worker_is_one_python_thread_for_its_whole_life() {
    let host = Host::ready(&places());
    let model = model(SCRIPT);
    let mut one = host.worker(&model);
    let mut other = host.worker(&model);
    let count = b"kept.count = getattr(kept, 'count', 0) + 1\n\
                  answer = [f'{kept.count} {threading.current_thread() is threading.main_thread()}']";
    for round in 1..=3 {
        assert_eq!(
            text(&one.run_one(count).unwrap()),
            format!("{round} False"),
            "thread-local values of the first worker"
        );
    }
    assert_eq!(text(&other.run_one(count).unwrap()), "1 False");
}

#[test]
fn workers_of_one_host_run_at_the_same_time() {
    let host = Host::ready(&places());
    let model = model(SCRIPT);
    let mut one = host.worker(&model);
    let mut other = host.worker(&model);
    // Each waits for the other, which ends only if both are inside at once.
    let meet = b"import builtins\n\
                 gate = builtins.__dict__.setdefault('gate', threading.Barrier(2))\n\
                 gate.wait(20)\n\
                 answer = ['met']";
    one.send(&[meet]);
    other.send(&[meet]);
    assert_eq!(text(one.receive().unwrap().0[0].as_ref().unwrap()), "met");
    assert_eq!(text(other.receive().unwrap().0[0].as_ref().unwrap()), "met");
}

#[test]
fn a_stopped_worker_frees_its_model_while_others_sit_idle() {
    let host = Host::ready(&places());
    let source = r#"
import os
class Handler:
    def initialize(self, context):
        self.mark = os.path.join(context.system_properties["model_dir"], "freed")
    def handle(self, data, context):
        return [b""] * len(data)
    def __del__(self):
        open(self.mark, "w").close()
"#;
    let model = model(source);
    let mark = model.dir.path().join("freed");
    let _idle = host.worker(&harness::model(ECHO));
    let mut worker = host.worker(&model);
    worker.run_one(b"").unwrap();
    assert!(!mark.exists());
    worker.stop();
    assert!(mark.exists(), "the model is still in memory");
}

#[test]
fn a_handler_that_ends_the_process_closes_the_channel() {
    for script in [
        "os._exit(7)",
        "os.abort()",
        // The signal may need a moment: Python first writes down where its threads are.
        "os.kill(os.getpid(), signal.SIGSEGV); time.sleep(60)",
        "import ctypes; ctypes.string_at(0)",
    ] {
        let (mut host, mut worker) = scripted();
        worker.send(&[script.as_bytes()]);
        let error = worker.receive().err().unwrap();
        let gone = matches!(error, WireError::Closed);
        assert!(gone, "{script}: {error}");
        let status = host.wait(Duration::from_secs(10));
        assert!(!status.success(), "{script}: {status}");
    }
}

#[test]
fn a_host_ends_with_its_server_whatever_its_workers_do() {
    for script in [
        "time.sleep(3600)",
        "while True: pass",
        // Inside native code that keeps the interpreter's lock.
        "import re; re.match('(a*)*b', 'a' * 64)",
    ] {
        let (mut host, mut worker) = scripted();
        worker.send(&[script.as_bytes()]);
        std::thread::sleep(Duration::from_millis(200));
        host.close();
        let closed = Instant::now();
        let status = host.wait(Duration::from_secs(10));
        assert!(status.success(), "{script}: {status}");
        assert!(closed.elapsed() < Duration::from_secs(1), "{script}");
    }
}

#[test]
fn grandchildren_get_neither_the_control_socket_nor_a_workers() {
    let (_host, mut worker) = scripted();
    let script = b"import subprocess\n\
        code = 'import os; print([os.readlink(f\"/proc/self/fd/{n}\") for n in range(200) '\\\n\
               'if os.path.lexists(f\"/proc/self/fd/{n}\")])'\n\
        run = subprocess.run([sys.executable, '-c', code], capture_output=True, close_fds=False)\n\
        answer = [run.stdout]";
    let descriptors = text(&worker.run_one(script).unwrap());
    assert!(descriptors.contains("/dev/null"), "{descriptors}");
    assert!(!descriptors.contains("socket:"), "{descriptors}");
}

#[test]
fn python_is_the_environments_and_honours_pythonpath() {
    let extra = tempfile::tempdir().unwrap();
    fs_err::write(extra.path().join("from_pythonpath.py"), "value = 'found'").unwrap();
    let places = places();
    let host =
        Host::start(&places, &[("PYTHONPATH", extra.path().as_os_str())], false).expect_ready();
    let mut worker = host.worker(&model(SCRIPT));
    let answer = worker.run_one(
        b"import from_pythonpath, ts\n\
          answer = [dict(executable=sys.executable, prefix=sys.prefix, utf8=sys.flags.utf8_mode,\n\
              ts=ts.__file__, value=from_pythonpath.value, cwd=os.getcwd(), argv=sys.argv)]",
    );
    let answer = text(&answer.unwrap());
    for wanted in [
        format!("\"executable\": \"{}\"", places.executable.display()),
        format!("\"prefix\": \"{}\"", places.prefix.display()),
        format!("\"ts\": \"{}/ts/__init__.py\"", places.handlers.display()),
        "\"utf8\": 1".to_owned(),
        "\"value\": \"found\"".to_owned(),
    ] {
        assert!(answer.contains(&wanted), "no {wanted} in {answer}");
    }
}

#[test]
fn a_host_works_in_an_empty_environment() {
    let host = Host::start(&places(), &[], true).expect_ready();
    let mut worker = host.worker(&model(SCRIPT));
    let script = "answer = ['\u{e9}' + open('caf\u{e9}', 'w').name]";
    let answer = worker.run_one(script.as_bytes()).unwrap();
    assert_eq!(text(&answer), "\u{e9}caf\u{e9}");
}

#[test]
fn the_wrong_environment_is_refused_with_a_reason() {
    let mut places = places();
    places.prefix = "/somewhere/else".into();
    let message = Host::start(&places, &[], false).expect_failed();
    assert!(
        message.contains("instead of `/somewhere/else`"),
        "{message}"
    );
    assert!(message.contains("PYTHONHOME"), "{message}");
    assert!(!message.contains('\n'), "{message}");
}

#[test]
fn a_python_that_cannot_start_is_refused_with_a_reason() {
    let nowhere = [("PYTHONHOME", "/nowhere".as_ref())];
    let places = places();
    let message = Host::start(&places, &nowhere, false).expect_failed();
    let executable = places.executable.to_string_lossy();
    assert!(message.contains(&*executable), "{message}");
    assert!(message.contains("PYTHONHOME"), "{message}");
    assert!(!message.contains('\n'), "{message}");
}

#[test]
fn a_missing_ts_package_is_refused_with_a_reason() {
    let empty = tempfile::tempdir().unwrap();
    let mut places = places();
    places.handlers = empty.path().to_owned();
    // Unless the environment itself has a `ts`, which the tests' does not.
    let message = Host::start(&places, &[], false).expect_failed();
    assert!(
        message.contains(&*places.handlers.to_string_lossy()),
        "{message}"
    );
    assert!(message.contains("ModuleNotFoundError"), "{message}");
    assert!(!message.contains('\n'), "{message}");
}

/// The bridge is ours and its outcomes are what they should be; if they ever are not, a request is
/// still owed an answer and the worker stays.
#[test]
fn an_outcome_that_makes_no_sense_fails_its_batch_and_nothing_else() {
    let handlers = tempfile::tempdir().unwrap();
    let runtime = handlers.path().join("ts/_runtime");
    fs_err::create_dir_all(&runtime).unwrap();
    let bridge = "
def start_interpreter(): pass
class Session:
    side_effect_free = False
    def run(self, items):
        return eval(bytes(items[0][2][0][2]))
def load(spec, functions):
    if spec['handler'] == 'handler.py':
        return None, 'nonsense', 'a reason'
    return Session(), '', ''
";
    fs_err::write(runtime.join("bridge.py"), bridge).unwrap();
    let mut places = places();
    places.handlers = handlers.path().to_owned();
    let host = Host::ready(&places);
    let mut worker = host.worker(&model(SCRIPT));
    for outcome in [
        "None",
        "()",
        "7",
        "('nonsense', 200, '', [], [])",
        "(b'ok', 200, '', [], [])",
        "('ok', 200, '', [], [])",
        "('ok', 200, '', None, [])",
        "('ok', 200, '', [None], [])",
        "('ok', 200, '', [(70000, '', [], b'')], [])",
        "('ok', 200, '', [(200, None, [], b'')], [])",
        "('ok', 200, '', [(200, '', [('a',)], b'')], [])",
        "('ok', 200, '', [(200, '', [('a', 1)], b'')], [])",
        "('ok', 200, '', [(200, '', [], 'text')], [])",
        "('ok', 200, '', [(200, '', [], b'')], None)",
        "('ok', 200, '', [('nonsense', 503, '')], [])",
        "('ok', 200, '', [('handler_status', 400, None)], [])",
        "('ok', 200, '', [(200, '', [], b'')], [('a', 'b', 'c', 'gauge', [], '')])",
        "('handler_status', 200, None, [], [])",
        "1 / 0",
    ] {
        let failure = worker.run_one(outcome.as_bytes());
        assert_eq!(failure, Err(RunFailure::HandlerFailed), "{outcome}");
    }
    let failure = worker.run_one(b"bytearray(1 << 62)");
    assert_eq!(failure, Err(RunFailure::OutOfMemory));
    let failure = worker.run_one(b"('handler_status', 70000, 'x', [], [])");
    assert!(matches!(
        failure,
        Err(RunFailure::HandlerStatus { code: 500, .. })
    ));
    let good = b"('ok', 200, '', [(200, '', [], b'on')], [('a', 1, '', 'nonsense', [], '')])";
    let (answers, metrics) = worker.run_with_metrics(&[good]).unwrap();
    assert_eq!(answers[0].as_ref().unwrap().body, b"on");
    assert!(metrics.is_empty());

    let failure = host
        .try_worker(&model("class Handler: pass"))
        .err()
        .unwrap();
    assert_eq!(failure.kind, LoadFailureKind::Transient);
    assert_eq!(failure.message, "a reason");
}

#[test]
fn the_wrong_torch_is_refused_before_the_plugin_is_opened() {
    let mut places = places();
    places.torch_version = Some("2.12.0+cpu".to_owned());
    places.plugin = "/not/reached.so".into();
    let message = Host::start(&places, &[], false).expect_failed();
    assert!(
        message.contains(&format!("needs torch `{TORCH_VERSION}`")),
        "{message}"
    );

    places.torch_lib = None;
    places.torch_version = None;
    let message = Host::start(&places, &[], false).expect_failed();
    assert!(message.contains("has none"), "{message}");
}

#[test]
fn a_plugin_that_is_not_there_is_told_to_the_server() {
    let mut places = places();
    places.plugin = "/not/there.so".into();
    let message = Host::start(&places, &[], false).expect_failed();
    assert!(message.contains("/not/there.so"), "{message}");
}

/// Two copies of libtorch in a process would each have their own allocator, thread count and
/// registry of operators. Also after `import torch`, which must take ours, and for OpenMP.
#[test]
fn one_libtorch_and_one_openmp_serve_the_plugin_and_python() {
    let (_host, mut worker) = scripted();
    let mapped = "libs = sorted({line.split()[-1] for line in open('/proc/self/maps') \
                  if '.so' in line and any(name in line for name in NAMES)})\n\
                  answer = ['\\n'.join(libs)]";
    let names = |list: &str| format!("NAMES = {list}\n{mapped}");
    let before = names("['libtorch', 'libc10.so', 'gomp', 'libpython']");
    let before = text(&worker.run_one(before.as_bytes()).unwrap());
    let lib = places().torch_lib.unwrap();
    for name in ["libtorch_cpu.so", "libc10.so", "libgomp"] {
        let found: Vec<&str> = before.lines().filter(|path| path.contains(name)).collect();
        assert_eq!(found.len(), 1, "{name}: {before}");
        assert!(found[0].starts_with(&*lib.to_string_lossy()), "{before}");
    }
    // Python's part of torch and that for GPUs are the larger ones; models without torch go without.
    assert!(!before.contains("libtorch_python"), "{before}");
    assert!(!before.contains("libtorch_cuda"), "{before}");

    // The plugin set the thread count of this worker; torch was imported after that.
    let threads = worker.run_one(b"import torch\nanswer = [torch.get_num_threads()]");
    assert_eq!(text(&threads.unwrap()), INTRA_OP_THREADS.to_string());
    let after = names("['libtorch', 'libc10.so', 'gomp', 'libpython']");
    let after = text(&worker.run_one(after.as_bytes()).unwrap());
    assert!(after.contains("libtorch_python"), "{after}");
    for name in ["libtorch_cpu.so", "libc10.so", "libgomp", "libpython"] {
        let copies = after.lines().filter(|path| path.contains(name)).count();
        assert_eq!(copies, 1, "{name}: {after}");
    }
    let sum = worker.run_one(
        b"import torch\n\
          answer = [float(torch.ones(300, 300).mm(torch.ones(300, 300)).sum())]",
    );
    assert_eq!(text(&sum.unwrap()), "27000000.0");
}

/// The answer to "what does a host cost", for a person: `cargo test --release -p ts-plugin --
/// --nocapture what_a_host_costs`. The bounds only catch what is off by an order of magnitude.
#[test]
fn what_a_host_costs() {
    let started = Instant::now();
    let host = Host::ready(&places());
    let ready = started.elapsed();
    let no_op = model("def handle(data, context): return [b''] * len(data or [])");
    let [alone, batched] = cost_of_requests(&host, &no_op);
    let [echo_alone, echo_batched] = cost_of_requests(&host, &harness::echo_model());
    println!(
        "start to ready: {ready:?}; memory: {}; a request of 100 bytes, wall and the host's CPU \
         time: {alone}, without Python {echo_alone}; in a batch of 32 {batched}, without Python \
         {echo_batched}",
        host.memory(),
    );
    assert!(ready < Duration::from_secs(10));
    assert!(alone.wall_micros < 1000.0);
}

struct Cost {
    wall_micros: f64,
    cpu_micros: f64,
}

impl std::fmt::Display for Cost {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{:.1} and {:.1} us", self.wall_micros, self.cpu_micros)
    }
}

/// The cost of one request, alone and in a batch of 32.
fn cost_of_requests(host: &Host, model: &Model) -> [Cost; 2] {
    let mut worker = host.worker(model);
    let body: &[u8] = &[b'x'; 100];
    worker.run(&[body]).unwrap();
    [1, 32].map(|size| {
        let batch = vec![body; size];
        let rounds = 40_000 / size;
        let (started, cpu) = (Instant::now(), host.cpu());
        for _ in 0..rounds {
            worker.run(&batch).unwrap();
        }
        let micros = |time: Duration| time.as_secs_f64() * 1e6 / (rounds * size) as f64;
        Cost {
            wall_micros: micros(started.elapsed()),
            cpu_micros: micros(host.cpu() - cpu),
        }
    })
}
