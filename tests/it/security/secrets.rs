//! Secrets of the operator and of callers never come to light.

use std::path::Path;

use ts_test::Running;

use crate::server;
use crate::sources::{encoded, told};

const PASSWORD: &str = "the-word-of-the-keystore";
const INFERENCE: &str = "the-key-of-inference";
const MANAGEMENT: &str = "the-key-of-management";
const SIGNATURE: &str = "the-signature-of-a-url";
const USER: &str = "the-password-of-a-user";
const STORE_KEY: &str = "the-key-of-an-object-store";
const SHOWN: &str = "a-wrong-key-of-a-client";

const SECRETS: [&str; 7] = [
    PASSWORD, INFERENCE, MANAGEMENT, SIGNATURE, USER, STORE_KEY, SHOWN,
];

#[track_caller]
fn silent(where_from: &str, text: &str) {
    for secret in SECRETS {
        assert!(
            !text.contains(secret),
            "{where_from} tells `{secret}`:\n{text}"
        );
    }
}

/// Every file below a folder, but not what the test wrote there itself, and not the saved models: where
/// they came from has to be kept, for their owner alone.
fn files(folder: &Path, found: &mut Vec<(String, String)>) {
    for entry in fs_err::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if !path.ends_with("config.properties") && path.is_file() {
            let bytes = fs_err::read(&path).unwrap();
            found.push((
                path.display().to_string(),
                String::from_utf8_lossy(&bytes).into_owned(),
            ));
        }
    }
}

fn failing_calls(server: &Running) -> Vec<String> {
    let key = |key: &str| format!("Bearer {key}");
    let signed = encoded(&format!("http://127.0.0.1:1/m.mar?sig={SIGNATURE}"));
    let named = encoded(&format!("http://user:{USER}@127.0.0.1:1/m.mar"));
    let calls = [
        server
            .infer("POST", "/predictions/m")
            .header("authorization", &key(SHOWN)),
        server
            .manage("GET", "/models")
            .header("authorization", &key(SHOWN)),
        server
            .manage("GET", "/token?type=inference")
            .header("authorization", &key(MANAGEMENT)),
        server
            .infer("POST", "/predictions/none")
            .header("authorization", &key(INFERENCE)),
        server
            .manage("GET", "/models/none")
            .header("authorization", &key(MANAGEMENT)),
        server
            .manage("GET", "/models/m")
            .header("authorization", &key(MANAGEMENT)),
        server
            .manage("GET", "/models")
            .header("authorization", &key(MANAGEMENT)),
    ];
    let mut answers: Vec<String> = calls.into_iter().map(|call| call.send().text()).collect();
    for url in [signed, named] {
        let call = server.manage("POST", &format!("/models?url={url}"));
        let answer = call.header("authorization", &key(MANAGEMENT)).send();
        assert!(answer.status >= 400);
        // Who sent the address may read it.
        answers.push(answer.text().replace(SIGNATURE, "").replace(USER, ""));
    }
    answers
}

#[test]
fn secrets_are_told_nowhere_and_handed_to_no_host_se_13() {
    let url = format!("http://127.0.0.1:1/m.mar?sig={SIGNATURE}");
    let command = server()
        .snapshots()
        .with_default_safety()
        .echo_model("m", "minWorkers: 1\nmaxWorkers: 1")
        .config(&format!("keystore_pass={PASSWORD}"))
        .config(&format!("management_token={MANAGEMENT}"))
        .config("log_filter=trace")
        .config("enable_envvars_config=true")
        .env("TS_KEYSTORE_PASS", PASSWORD)
        .env("TS_INFERENCE_TOKEN", INFERENCE)
        .env("TS_MANAGEMENT_TOKEN", MANAGEMENT)
        .env("AWS_SECRET_ACCESS_KEY", STORE_KEY)
        .args(&["--enable-model-api", "--models", "m", &format!("n={url}")]);
    let server = command.clone().start();
    let log = told(&server, "Failed to load model");
    silent("the log", &log);
    for answer in failing_calls(&server) {
        silent("an answer", &answer);
    }
    server.wait_until("the worker is there", || !server.children().is_empty());
    for pid in server.children() {
        let environment = fs_err::read(format!("/proc/{pid}/environ")).unwrap();
        let environment = String::from_utf8_lossy(&environment).into_owned();
        // A handler may need the keys of an object store; `blacklist_env_vars` takes them away.
        silent("a host", &environment.replace(STORE_KEY, ""));
        let arguments = fs_err::read(format!("/proc/{pid}/cmdline")).unwrap();
        silent("a host's command", &String::from_utf8_lossy(&arguments));
    }
    let store = command.store();
    let store = store.to_str().unwrap();
    for options in [
        &["config", "--json", "--model-store", store][..],
        &["config", "--model-store", store],
    ] {
        let ran = command.run(options);
        silent("`torchserve config`", &(ran.stdout.clone() + &ran.stderr));
        assert!(ran.stdout.contains("keystore_pass") && ran.stdout.contains("inference_token"));
    }
    silent("the metrics", &server.metrics("/metrics").send().text());
    let server = server.stop_in_order();
    let mut found = Vec::new();
    files(server.folder(), &mut found);
    assert!(
        found
            .iter()
            .any(|(name, _)| name.contains("snapshot") || name.contains("config/"))
    );
    for (name, text) in found {
        // A model's address has to be kept somewhere: in a snapshot, for its owner alone.
        let kept = name.contains("/config/");
        silent(
            &name,
            &if kept {
                text.replace(SIGNATURE, "")
            } else {
                text
            },
        );
    }
}
