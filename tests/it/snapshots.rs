//! What a server saves of itself, and what the next one makes of it (*torchserve-contract* 2.7).

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use ts_test::{Running, Server};

use crate::server;

/// The snapshots in a folder, the oldest first.
fn snapshots(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs_err::read_dir(folder) else {
        return Vec::new();
    };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "cfg"));
    paths.sort_unstable();
    paths
}

fn saved(server: &Running) -> Vec<PathBuf> {
    snapshots(&server.folder().join("logs/config"))
}

/// The models of a snapshot, read as TorchServe's own tests read them: two escapes undone, then JSON.
fn models(path: &Path) -> Value {
    let text = fs_err::read_to_string(path).unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("model_snapshot="));
    let line = line.unwrap().replace("\\:", ":").replace("\\n", "\n");
    serde_json::from_str(&line).unwrap()
}

/// A snapshot as TorchServe or a person would write it.
fn write_snapshot(folder: &Path, name: &str, models: &Value) -> PathBuf {
    let config = folder.join("logs/config");
    fs_err::create_dir_all(&config).unwrap();
    let text = serde_json::to_string_pretty(models).unwrap();
    let text = text.replace(':', "\\:").replace('\n', "\\n");
    let addresses = ["inference", "management", "metrics"]
        .map(|api| format!("{api}_address=http\\://127.0.0.1\\:0\n"))
        .concat();
    let path = config.join(name);
    let file = format!(
        "#Saving snapshot\n#Mon Jan 01 00:00:00 UTC 2024\n{addresses}model_snapshot={text}\n"
    );
    fs_err::write(&path, file).unwrap();
    path
}

fn entry(archive: &str, workers: usize) -> Value {
    json!({"defaultVersion": true, "marName": archive, "minWorkers": workers, "maxWorkers": workers,
        "batchSize": 2, "maxBatchDelay": 50, "responseTimeout": 60, "startupTimeout": 70,
        "runtimeType": "echo"})
}

fn names(server: &Running) -> Vec<String> {
    let list = server.manage("GET", "/models").send().expect(200).json();
    let models = list["models"].as_array().unwrap().iter();
    models
        .map(|model| model["modelName"].as_str().unwrap().to_owned())
        .collect()
}

fn register(server: &Running, query: &str) {
    server
        .manage("POST", &format!("/models?{query}"))
        .send()
        .expect(200);
}

#[test]
fn files_are_written_at_the_start_at_each_change_and_at_the_end() {
    let server = server().snapshots().echo_model("m", "").start();
    let kinds = |server: &Running| -> Vec<String> {
        let kind = |path: &PathBuf| path.file_stem().unwrap().to_str().unwrap()[18..].to_owned();
        saved(server).iter().map(kind).collect()
    };
    assert_eq!(kinds(&server), ["startup"]);
    register(&server, "url=m&initial_workers=1");
    let newest = saved(&server).pop().unwrap();
    let document = models(&newest);
    assert_eq!(
        document["name"],
        newest.file_name().unwrap().to_str().unwrap()
    );
    assert_eq!(document["modelCount"], 1);
    assert!(document["created"].as_i64().unwrap() > 1_600_000_000_000);
    let one = &document["models"]["m"]["1.0"];
    for (member, value) in [
        ("defaultVersion", json!(true)),
        ("marName", json!("m")),
        ("minWorkers", json!(1)),
        ("maxWorkers", json!(1)),
        ("batchSize", json!(1)),
        ("maxBatchDelay", json!(100)),
        ("responseTimeout", json!(120)),
        ("startupTimeout", json!(120)),
        ("runtimeType", json!("echo")),
    ] {
        assert_eq!(one[member], value, "{member}");
    }
    for (method, path) in [
        ("PUT", "/models/m?min_worker=2&synchronous=true"),
        ("PUT", "/models/m?batch_size=4"),
        ("PUT", "/models/m/1.0/set-default"),
        ("DELETE", "/models/m"),
    ] {
        let before = saved(&server).len();
        server.manage(method, path).send().expect(200);
        assert_eq!(saved(&server).len(), before + 1, "{method} {path}");
    }
    // What changes nothing saves nothing.
    let before = saved(&server).len();
    server.manage("GET", "/models").send().expect(200);
    server
        .manage("PUT", "/models/m?min_worker=1")
        .send()
        .expect(404);
    assert_eq!(saved(&server).len(), before);
    let settings = fs_err::read_to_string(&newest).unwrap();
    assert!(
        settings.contains("\nmanagement_address=http\\://127.0.0.1\\:0\n"),
        "{settings}"
    );
    assert!(settings.contains("\nenable_model_api=true\n"), "{settings}");
    assert!(
        settings.contains("\ntsConfigFile=config.properties\n"),
        "{settings}"
    );
    let folder = server.stop_in_order();
    let last = snapshots(&folder.folder().join("logs/config"))
        .pop()
        .unwrap();
    assert!(
        last.display().to_string().ends_with("-shutdown.cfg"),
        "{last:?}"
    );
}

#[test]
fn nothing_is_written_or_read_with_ncs() {
    let mut server = server().echo_model("m", "");
    write_snapshot(
        server.folder(),
        "20240101000000000-shutdown.cfg",
        &json!({"modelCount": 1, "models": {"m": {"1.0": entry("m", 0)}}}),
    );
    server = server.echo_model("n", "");
    let server = server.start();
    assert_eq!(names(&server), [""; 0]);
    register(&server, "url=n");
    assert_eq!(saved(&server).len(), 1, "none of ours");
}

/// RG-06, SN-03, and 13.1 #12: whatever was acknowledged is there after a `kill -9`.
#[test]
fn a_killed_server_comes_back_as_it_was() {
    let server = server().snapshots().start();
    for (folder, version) in [("m1", "1.0"), ("m2", "2.0"), ("m3", "3.0")] {
        server.echo_model(folder, version, "batchSize: 3\n");
        register(
            &server,
            &format!("url={folder}&model_name=m&response_timeout=9"),
        );
    }
    register(&server, "url=m1&model_name=gone");
    register(
        &server,
        "url=m1&model_name=grown&worker_isolation=process&autoscale=true&initial_workers=1",
    );
    for (method, path) in [
        ("PUT", "/models/m/2.0/set-default"),
        (
            "PUT",
            "/models/m/2.0?min_worker=1&max_worker=3&synchronous=true",
        ),
        (
            "PUT",
            "/models/m/2.0?batch_size=7&max_batch_delay=0&response_timeout=33&job_queue_size=5",
        ),
        ("DELETE", "/models/m/3.0"),
        ("DELETE", "/models/gone"),
    ] {
        server.manage(method, path).send().expect(200);
    }
    let all = |server: &Running| {
        let told = |name: &str| {
            let path = format!("/models/{name}/all");
            let mut versions = server.manage("GET", &path).send().expect(200).json();
            for version in versions.as_array_mut().unwrap() {
                version.as_object_mut().unwrap().remove("workers");
            }
            versions
        };
        (names(server), told("m"), told("grown"))
    };
    let before = all(&server);
    let server = server.kill().start();
    server.wait_ready("m");
    assert_eq!(all(&server), before);
    assert_eq!(names(&server), ["grown", "m"]);
    let described = server.describe("m");
    assert_eq!(described["modelVersion"], "2.0", "the default");
    assert_eq!(described["batchSize"], 7);
    assert_eq!(described["loadedAtStartup"], false);
    let path = "/predictions/m";
    server.infer("POST", path).body("x").send().expect(200);
    // And once more, after an end in order.
    let server = server.stop_in_order().start();
    assert_eq!(all(&server), before);
}

#[test]
fn files_of_torchserve_and_files_written_by_hand_are_read() {
    let mut old = entry("m", 1);
    for gap in ["responseTimeout", "startupTimeout"] {
        old.as_object_mut().unwrap().remove(gap);
    }
    old["parallelLevel"] = json!(0);
    old["maxBatchDelay"] = json!(-10000);
    let document = json!({"name": "x-startup.cfg", "modelCount": 1, "created": 1_700_000_000_000_i64,
        "models": {"named": {"1.0": old}}});
    let server = server().snapshots().echo_model("m", "");
    // A name that is none of ours says nothing.
    write_snapshot(
        server.folder(),
        "29990101-notes.cfg",
        &json!({"models": {}}),
    );
    let path = write_snapshot(server.folder(), "20240101000000000-startup.cfg", &document);
    let running = server.clone().start();
    running.wait_ready("named");
    let described = running.describe("named");
    for (member, value) in [
        ("minWorkers", 1),
        ("batchSize", 2),
        ("maxBatchDelay", 0),
        ("responseTimeout", 120),
        ("startupTimeout", 120),
    ] {
        assert_eq!(described[member], value, "{member}");
    }
    running.stop_in_order();
    // Named, and read-only: snapshots go where they always go.
    let elsewhere = server.folder().join("mine.cfg");
    fs_err::rename(path, &elsewhere).unwrap();
    fs_err::remove_dir_all(server.folder().join("logs")).unwrap();
    let mut permissions = fs_err::metadata(&elsewhere).unwrap().permissions();
    permissions.set_readonly(true);
    fs_err::set_permissions(&elsewhere, permissions).unwrap();
    let running = server
        .args(&["--ts-config", elsewhere.to_str().unwrap()])
        .start();
    assert_eq!(names(&running), ["named"]);
    assert_eq!(saved(&running).len(), 1);
}

/// SN-01: arguments beat saved state, and one archive that is gone does not hold up the others.
#[test]
fn models_named_on_the_command_line_beat_the_saved_ones() {
    let server = server().snapshots();
    let server = ["a", "b", "c"]
        .iter()
        .fold(server, |server, name| server.echo_model(name, ""));
    let running = server.clone().start();
    register(&running, "url=a");
    register(&running, "url=b");
    running.stop_in_order();
    fs_err::remove_dir_all(server.store().join("b")).unwrap();
    let explicit = server.clone().args(&["--models", "b", "c"]).start();
    assert_eq!(names(&explicit), ["c"]);
    explicit.wait_until("both are told", || {
        let output = explicit.output();
        output.contains("Failed to load model: b")
            && output.contains("2 saved models")
            && output.contains("are not restored")
    });
    drop(explicit.kill());
    // Which is then the state that is saved; and ALL means all.
    assert_eq!(names(&server.clone().start()), ["c"]);
    for more in [&[][..], &["--ncs"]] {
        let all = server.clone().args(&["--models", "ALL"]).args(more).start();
        assert_eq!(names(&all), ["a", "c"]);
    }
}

/// SN-02: with a named configuration file the saved models are told, or restored if asked for.
#[test]
fn a_named_configuration_file_restores_on_demand() {
    let server = server().snapshots().named_config().echo_model("m", "");
    let running = server.clone().start();
    register(&running, "url=m");
    running.kill();
    let with = server.clone().config("restore_models=true").start();
    assert_eq!(names(&with), ["m"]);
    with.kill();
    let without = server.start();
    assert_eq!(names(&without), [""; 0]);
    without.wait_until("it is told", || {
        let output = without.output();
        output.contains("1 saved models") && output.contains("restore_models=true")
    });
}

#[test]
fn a_missing_archive_stops_the_start_and_says_what_to_do() {
    let server = server().snapshots().echo_model("m", "").echo_model("n", "");
    let running = server.clone().start();
    register(&running, "url=m");
    register(&running, "url=n");
    running.kill();
    for name in ["m", "n"] {
        fs_err::remove_dir_all(server.store().join(name)).unwrap();
    }
    let (status, output) = server.clone().start_and_fail();
    assert_eq!(status.code(), Some(1), "{output}");
    for text in [
        "Model archive file for model :m, version :1.0 not found in model store",
        "model :n, version :1.0",
        "--models",
        "-snapshot.cfg line",
    ] {
        assert!(output.contains(text), "no `{text}`:\n{output}");
    }
    // What was saved is still there when they come back.
    let server = server.echo_model("m", "").echo_model("n", "");
    assert_eq!(names(&server.start()), ["m", "n"]);
}

#[test]
fn an_archive_that_became_junk_is_listed_and_says_so() {
    let server = server().snapshots().echo_model("good", "");
    fs_err::write(server.store().join("junk.mar"), "not an archive").unwrap();
    let mut other = entry("good", 1);
    other["defaultVersion"] = json!(false);
    let document = json!({"modelCount": 2, "models": {
        "junk": {"1.0": entry("junk.mar", 1)},
        // The archive has another version by now.
        "good": {"1.0": entry("good", 1), "9.0": other},
    }});
    write_snapshot(server.folder(), "20240101000000000-startup.cfg", &document);
    let running = server.clone().start();
    running.wait_ready("good");
    assert_eq!(names(&running), ["good", "junk"]);
    let described = running.describe("junk");
    assert_eq!(described["modelVersion"], "1.0");
    assert_eq!(described["workers"], json!([]));
    let failure = described["lastFailure"].as_str().unwrap();
    assert!(failure.contains("junk.mar"), "{failure}");
    running
        .infer("POST", "/predictions/junk")
        .send()
        .expect(503);
    running.wait_until("the other version is told", || {
        running
            .output()
            .contains("Failed to restore model: good version: 9.0")
    });
    // It is not forgotten: once its archive is right again, it has its workers.
    running.kill();
    fs_err::remove_file(server.store().join("junk.mar")).unwrap();
    let server = server.echo_model("junk.mar", "");
    let running = server.start();
    running.wait_ready("junk");
}

#[test]
fn a_damaged_or_newer_snapshot_is_passed_over_and_told() {
    let server = server().snapshots().echo_model("m", "");
    let running = server.clone().start();
    register(&running, "url=m");
    running.kill();
    let config = server.folder().join("logs/config");
    let newer = json!({"schemaVersion": 99, "modelCount": 1, "models": []});
    write_snapshot(server.folder(), "29990101000000000-snapshot.cfg", &newer);
    fs_err::write(
        config.join("29990101000000001-startup.cfg"),
        "model_store=/x\nmodel_sna",
    )
    .unwrap();
    let running = server.start();
    assert_eq!(names(&running), ["m"]);
    running.wait_until("both are told", || {
        let output = running.output();
        output.contains(
            "29990101000000000-snapshot.cfg` is passed over: the saved models have schema",
        ) && output.contains("29990101000000001-startup.cfg` is passed over")
    });
    // The next one is the newest all the same.
    register(&running, "url=m&model_name=n");
    assert_eq!(names(&running.kill().start()), ["m", "n"]);
}

#[test]
fn log_location_moves_the_folder_and_a_bad_one_only_costs_the_snapshots() {
    let elsewhere = tempfile::tempdir().unwrap();
    let place = elsewhere.path().to_str().unwrap();
    let moved = server().snapshots().env("LOG_LOCATION", place).start();
    assert!(saved(&moved).is_empty());
    assert_eq!(snapshots(&elsewhere.path().join("config")).len(), 1);
    drop(moved);
    // A file where the folder should be: no permission is needed to see it fail.
    fs_err::write(elsewhere.path().join("file"), "").unwrap();
    let place = elsewhere.path().join("file/logs");
    let server = server()
        .snapshots()
        .env("LOG_LOCATION", place.to_str().unwrap());
    let server = server.echo_model("m", "").start();
    server.wait_until("it is told", || {
        server.output().contains("no snapshot can be written")
    });
    let answer = server.manage("POST", "/models?url=m").send().expect(200);
    let warning = answer.header("x-warning").unwrap();
    assert!(warning.contains("will not survive a restart"), "{warning}");
    server.manage("GET", "/models/m").send().expect(200);
    let status = { server }.stop();
    assert!(status.success());
}

#[test]
fn a_hand_written_configuration_may_have_the_models_itself() {
    let with_models = |server: Server, models: &Value| {
        let line = format!("model_snapshot={models}");
        server.config("load_models=all").config(&line)
    };
    let document = json!({"name": "startup.cfg", "modelCount": 1,
        "models": {"named": {"1.0": entry("m", 1)}}});
    let fresh = || server().echo_model("m", "").echo_model("other", "");
    let running = with_models(fresh(), &document).start();
    running.wait_ready("named");
    assert_eq!(
        names(&running),
        ["named"],
        "the snapshot wins over `load_models`"
    );
    drop(running);
    // A fault in it is told with the others.
    let (status, output) = with_models(fresh(), &json!({"models": {"m": {"1.0": {}}}}))
        .config("job_queue_size=x")
        .start_and_fail();
    assert_eq!(status.code(), Some(1));
    assert!(
        output.contains("model_snapshot: the saved models cannot be read")
            && output.contains("job_queue_size"),
        "{output}"
    );
}

/// An archive that the registration fetched belongs to the model after a restart too.
#[test]
fn a_fetched_archive_is_found_again_and_goes_with_the_model() {
    let server = server().snapshots();
    let outside = server.folder().join("elsewhere");
    fs_err::create_dir_all(&outside).unwrap();
    let archive = outside.join("m.tar.gz");
    let running = server.clone().start();
    running.echo_model("m", "1.0", "");
    let packed = std::process::Command::new("tar")
        .arg("-czf")
        .arg(&archive)
        .args(["-C", server.store().to_str().unwrap(), "m"])
        .status()
        .unwrap();
    assert!(packed.success());
    fs_err::remove_dir_all(server.store().join("m")).unwrap();
    register(&running, &format!("url=file://{}", archive.display()));
    fs_err::remove_dir_all(&outside).unwrap();
    let running = running.kill().start();
    assert_eq!(names(&running), ["m"]);
    let url = running.describe("m")["modelUrl"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(url.starts_with("file:///"), "{url}");
    assert!(server.store().join("m.tar.gz").is_file());
    running.manage("DELETE", "/models/m").send().expect(200);
    assert!(!server.store().join("m.tar.gz").exists());
    assert_eq!(names(&running.kill().start()), [""; 0]);
}

/// A start that is broken off has read a better state than the one it has reached.
#[test]
fn a_server_that_is_ended_while_it_restores_loses_nothing() {
    let server = server().snapshots().echo_model("m", "");
    let running = server.clone().start();
    for number in 0..40 {
        register(&running, &format!("url=m&model_name=m{number}"));
    }
    running.kill();
    for (number, signal) in [Signal::KILL, Signal::TERM]
        .iter()
        .cycle()
        .take(8)
        .enumerate()
    {
        let after = Duration::from_millis(10 * number as u64);
        server.clone().start_and_signal(after, *signal);
    }
    assert_eq!(names(&server.start()).len(), 40);
}

/// What lies in a folder of the store was registered by its path, and is found again there.
#[test]
fn an_archive_deeper_in_the_store_is_found_again() {
    let server = server().snapshots().echo_folder("team/m", "m", "1.0");
    let running = server.clone().start();
    register(&running, "url=team/m");
    running.kill();
    let running = server.start();
    assert_eq!(names(&running), ["m"]);
    assert_eq!(running.describe("m")["modelUrl"], "team/m");
}

/// A flag that was given once stays in the snapshots, as TorchServe has it. Whoever starts without it
/// is told that the server is open all the same.
#[test]
fn protection_that_is_off_by_a_snapshot_is_told() {
    let open = server().snapshots();
    let running = open.start();
    running.manage("GET", "/models").send().expect(200);
    let running = running.stop_in_order();
    let warning = "and not this command line, switches `disable_token_authorization` and \
                   `enable_model_api` on";
    // Given again: nothing to tell.
    let running = running.start();
    assert!(!running.output().contains("not this command line"));
    let plain = running.stop_in_order().with_default_safety().start();
    plain.manage("GET", "/models").send().expect(200);
    plain.wait_until("it is told", || plain.output().contains(warning));
    let plain = plain.stop_in_order();
    let store = plain.store();
    let shown = plain.run(&["config", "--model-store", store.to_str().unwrap()]);
    assert!(shown.stdout.contains(warning), "{}", shown.stdout);
    // As the line says.
    let safe = plain.named_config().start();
    safe.manage("GET", "/models").send().expect(400);
    assert!(!safe.output().contains("not this command line"));
}

/// An archive that one model brought and another one uses stays for the other.
#[test]
fn an_archive_that_another_model_uses_does_not_go_with_the_first() {
    let origin = ts_test::Origin::serving(crate::sources::archive());
    let running = server().snapshots().start();
    register(&running, &format!("url={}", origin.url("/m.mar")));
    register(&running, "url=m.mar&model_name=n");
    running.manage("DELETE", "/models/m").send().expect(200);
    assert_eq!(names(&running.kill().start()), ["n"]);
}

/// A call that comes during the start waits until the state of the start is saved. If that never is,
/// it is answered all the same.
#[test]
fn a_call_during_a_start_that_is_broken_off_is_answered() {
    let origin = ts_test::Origin::start(|_, stream, _| {
        std::thread::sleep(Duration::from_secs(30));
        ts_test::write_answer(stream, "200 OK", &[], b"")
    });
    let url = origin.url("/slow.mar");
    let command = server()
        .snapshots()
        .echo_model("m", "")
        .args(&["--models", &url]);
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let management = format!("http://{}", free.local_addr().unwrap());
    drop(free);
    let line = format!("management_address={management}");
    let command = command.config(&line);
    let manage = |method, path: &str| ts_test::Request::new(method, format!("{management}{path}"));
    let running = command.start_in_background();
    running.wait_for("download started");
    std::thread::scope(|scope| {
        let call = scope.spawn(|| manage("POST", "/models?url=m").send());
        running.wait_for("model registered");
        let began = std::time::Instant::now();
        assert_eq!(command.run(&["--stop", "--foreground"]).code, Some(0));
        assert!(
            began.elapsed() < Duration::from_secs(10),
            "{}",
            running.output()
        );
        let answer = call.join().unwrap().expect(200);
        let warning = answer.header("x-warning").unwrap().to_owned();
        assert!(warning.contains("will not survive"), "{warning}");
    });
}
