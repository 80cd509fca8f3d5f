//! Settings that reach the server from each source, and what it says about bad ones.

use crate::server;

#[test]
fn a_queue_size_from_the_file_and_one_from_the_environment_take_effect() {
    let shown = |server: ts_test::Server| {
        let server = server.echo_model("m", "minWorkers: 1\nmaxWorkers: 1");
        let server = server.args(&["--models", "m"]).start();
        server.wait_ready("m");
        server.describe("m")["jobQueueStatus"]["remainingCapacity"].clone()
    };
    assert_eq!(shown(server()), 100);
    assert_eq!(shown(server().config("job_queue_size = 7")), 7);
    let environment = |server: ts_test::Server| server.env("TS_JOB_QUEUE_SIZE", "9");
    // Only where the file allows it.
    assert_eq!(shown(environment(server().config("job_queue_size=7"))), 7);
    assert_eq!(
        shown(environment(
            server().config("job_queue_size=7\nenable_envvars_config=true")
        )),
        9
    );
}

#[test]
fn all_faults_are_told_at_once_and_nothing_starts() {
    let (status, output) = server()
        .config("job_queue_size=many")
        .config("default_response_timeout=-x")
        .config("inference_address=ftp://127.0.0.1")
        .start_and_fail();
    assert_eq!(status.code(), Some(1), "{output}");
    for key in [
        "job_queue_size",
        "default_response_timeout",
        "inference_address",
    ] {
        assert!(output.contains(key), "{key} is not told:\n{output}");
    }
}

#[test]
fn an_unknown_key_is_warned_about_with_the_nearest_known_name() {
    let server = server().config("job_que_size=7").start();
    server.wait_until("the warning", || {
        let output = server.output();
        output.contains("job_que_size") && output.contains("job_queue_size")
    });
}

#[test]
fn usage_errors_end_with_status_two_and_missing_folders_with_one() {
    let (status, output) = server().args(&["--no-such-flag"]).start_and_fail();
    assert_eq!(status.code(), Some(2), "{output}");
    let (status, output) = server()
        .args(&["--workflow-store", "/does/not/exist"])
        .start_and_fail();
    assert_eq!(status.code(), Some(1), "{output}");
    assert!(
        output.contains("--workflow-store directory not found: /does/not/exist"),
        "{output}"
    );
}

#[test]
fn an_address_in_use_is_named() {
    let first = server().start();
    let taken = first.inference.clone();
    let (status, output) = server()
        .config(&format!("inference_address={taken}"))
        .start_and_fail();
    assert_eq!(status.code(), Some(1), "{output}");
    let address = taken.trim_start_matches("http://");
    assert!(
        output.contains("Failed to bind to address") && output.contains(address),
        "{output}"
    );
}

#[test]
fn paths_with_blanks_and_odd_letters_work() {
    let server = server();
    let store = server.store().join("a b/ü#%");
    fs_err::create_dir_all(&store).unwrap();
    let text = store.to_str().unwrap().to_owned();
    let server = server.args(&["--model-store", &text]).start();
    server.manage("GET", "/models").send().expect(200);
}
