//! Tokens: every action with every key, keys that the operator chose, and what is counted.

use std::os::unix::fs::PermissionsExt as _;

use serde_json::json;
use ts_test::{Answer, Running, Server};

use super::{Keys, bearer, message};
use crate::server;

const REFUSED: &str =
    "Token Authorization failed. Token either incorrect, expired, or not provided correctly";
const NOT_RENEWED: &str =
    "Token Authentication failed. Token either incorrect, expired, or not provided correctly";

/// Which key an action needs.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Needs {
    Inference,
    Management,
    Api,
    Nothing,
}

/// Every action of every listener. Other protocols have the same actions; who adds one adds its calls
/// here, and the table below holds for them.
const CALLS: &[(&str, &str, &str, Needs)] = &[
    ("inference", "GET", "/ping", Needs::Inference),
    ("inference", "POST", "/predictions/m", Needs::Inference),
    ("inference", "POST", "/predictions/m/1.0", Needs::Inference),
    ("inference", "POST", "/explanations/m", Needs::Inference),
    (
        "inference",
        "POST",
        "/invocations?model_name=m",
        Needs::Inference,
    ),
    ("inference", "POST", "/models/m/invoke", Needs::Inference),
    ("inference", "POST", "/m/predict", Needs::Inference),
    (
        "inference",
        "POST",
        "/v1/models/m:predict",
        Needs::Inference,
    ),
    ("inference", "POST", "/v2/models/m/infer", Needs::Inference),
    ("inference", "GET", "/api-description", Needs::Nothing),
    ("inference", "OPTIONS", "/predictions/m", Needs::Nothing),
    ("management", "GET", "/models", Needs::Management),
    (
        "management",
        "POST",
        "/models?url=none.mar",
        Needs::Management,
    ),
    ("management", "GET", "/models/m", Needs::Management),
    ("management", "GET", "/models/m/all", Needs::Management),
    ("management", "GET", "/models/m/batching", Needs::Management),
    (
        "management",
        "PUT",
        "/models/m?min_worker=1",
        Needs::Management,
    ),
    (
        "management",
        "PUT",
        "/models/m/1.0/set-default",
        Needs::Management,
    ),
    ("management", "DELETE", "/models/none", Needs::Management),
    ("management", "GET", "/v1/models/m", Needs::Management),
    ("management", "GET", "/token?type=inference", Needs::Api),
    ("management", "GET", "/token?type=management", Needs::Api),
    ("management", "GET", "/api-description", Needs::Nothing),
    ("metrics", "GET", "/metrics", Needs::Nothing),
];

fn call(server: &Running, api: &str, method: &'static str, path: &str, header: &str) -> Answer {
    let request = match api {
        "inference" => server.infer(method, path),
        "management" => server.manage(method, path),
        _ => server.metrics(path),
    };
    match header {
        "" => request,
        header => request.header("authorization", header),
    }
    .send()
}

fn with_tokens() -> Server {
    let yaml = "minWorkers: 1\nmaxWorkers: 1";
    let server = server().echo_model("m", yaml).with_default_safety();
    server.args(&["--models", "m", "--enable-model-api"])
}

#[test]
fn every_action_takes_its_own_token_and_no_other_se_06() {
    let server = with_tokens().start();
    let ended = with_tokens().config("token_expiration_min=0.0001").start();
    let (keys, old) = (Keys::of(&server), Keys::of(&ended));
    ended.wait_until("the tokens have ended", || {
        let header = bearer(&old.management);
        call(&ended, "management", "GET", "/models", &header).status == 400
    });
    for &(api, method, path, needs) in CALLS {
        let refusal = if needs == Needs::Api {
            NOT_RENEWED
        } else {
            REFUSED
        };
        let refused = |server: &Running, header: &str| {
            let answer = call(server, api, method, path, header).expect(400);
            assert_eq!(
                (answer.json()["type"].as_str(), message(&answer).as_str()),
                (Some("InvalidKeyException"), refusal),
                "{method} {path} with {header}"
            );
        };
        let taken = |server: &Running, header: &str| {
            let answer = call(server, api, method, path, header);
            assert!(
                !answer.text().contains("InvalidKey"),
                "{method} {path} with {header}: {}",
                answer.text()
            );
        };
        // Asked for anew: some calls replace them.
        let now = Keys::of(&server);
        for (key, of) in [
            (&now.inference, Needs::Inference),
            (&now.management, Needs::Management),
            (&now.api, Needs::Api),
        ] {
            // With blanks, tabs and all else that a header may have around its one key.
            for header in [bearer(key), format!("Bearer \t {key}")] {
                if needs == of || needs == Needs::Nothing {
                    taken(&server, &header);
                } else {
                    refused(&server, &header);
                }
            }
        }
        let right = match needs {
            Needs::Inference => &now.inference,
            Needs::Management => &now.management,
            Needs::Api => &keys.api,
            Needs::Nothing => continue,
        };
        let now = Keys::of(&server);
        for header in [
            String::new(),
            "Bearer".to_owned(),
            "Bearer wrong".to_owned(),
            format!("bearer {right}"),
            format!("Basic {right}"),
            format!("Bearer{right}"),
            format!("Bearer {right} {right}"),
            format!("Bearer {right}x"),
            format!("Bearer {}", &right[1..]),
            right.clone(),
        ] {
            refused(&server, &header);
        }
        if needs == Needs::Inference || needs == Needs::Management {
            for key in [&old.inference, &old.management] {
                refused(&ended, &bearer(key));
            }
        }
        assert_eq!(
            Keys::of(&server).management,
            now.management,
            "refused calls renew none"
        );
    }
}

#[test]
fn a_call_about_tokens_is_one_by_its_path_alone() {
    let server = with_tokens().start();
    let keys = Keys::of(&server);
    // TorchServe takes a call for one that renews tokens if `/token` stands anywhere in it.
    for (path, name) in [("/models?x=/token", "x-a"), ("/models", "referer")] {
        let asked = server
            .manage("GET", path)
            .header("authorization", &bearer(&keys.management))
            .header(name, "http://h/token?type=management");
        asked.send().expect(200);
    }
    let renew = |query: &str| {
        let path = format!("/token{query}");
        call(&server, "management", "GET", &path, &bearer(&keys.api))
    };
    for odd in [
        "",
        "?type=",
        "?type=API",
        "?type=api",
        "?type=Inference",
        "?typ=inference",
    ] {
        let answer = renew(odd).expect(400);
        assert_eq!(message(&answer), NOT_RENEWED, "{odd}");
    }
    assert_eq!(Keys::of(&server).inference, keys.inference);
    assert_eq!(renew("?type=inference").expect(200).text(), "\n");
    let now = Keys::of(&server);
    assert_ne!(now.inference, keys.inference);
    assert_eq!((now.management, now.api), (keys.management, keys.api));
    let file = server.folder().join("key_file.json");
    let mode = fs_err::metadata(file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_listener_of_all_apis_takes_the_token_of_each() {
    let server = with_tokens();
    let socket = server.folder().join("all.sock");
    let place = format!("unix:{}", socket.display());
    let server = server
        .config(&format!("management_address={place}"))
        .config(&format!("inference_address={place}"))
        .start();
    let keys = Keys::of(&server);
    let status = |path: &str, key: &str| {
        use std::io::{Read as _, Write as _};
        let mut stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n");
        write!(stream, "{head}authorization: Bearer {key}\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer[9..12].parse::<u16>().unwrap()
    };
    assert_eq!(status("/models", &keys.management), 200);
    assert_eq!(status("/models", &keys.inference), 400);
    assert_ne!(status("/ping", &keys.inference), 400);
    assert_eq!(status("/ping", &keys.management), 400);
}

#[test]
fn refused_tokens_are_counted_by_what_was_wrong() {
    let server = with_tokens().start();
    for header in ["", "Bearer wrong", "Bearer wrong"] {
        call(&server, "inference", "POST", "/predictions/m", header).expect(400);
    }
    let text = server.metrics("/metrics").send().expect(200).text();
    for (reason, count) in [("missing", "1.0"), ("wrong", "2.0")] {
        let line = format!("ts_token_refusals_total{{Reason=\"{reason}\",}} {count}");
        assert!(text.contains(&line), "{line}\n{text}");
    }
}

#[test]
fn the_operator_chooses_keys_in_a_file_that_is_read_again() {
    let server = with_tokens();
    let file = server.folder().join("tokens.json");
    let write = |inference: serde_json::Value| {
        let beside = file.with_extension("new");
        let told = json!({"inference": inference, "management": {"key": "management-key"},
                          "API": {"key": "key-of-the-api"}});
        fs_err::write(&beside, told.to_string()).unwrap();
        fs_err::rename(&beside, &file).unwrap();
    };
    write(json!({"key": "the-first-key"}));
    let server = server.env("TS_TOKEN_FILE", "tokens.json").start();
    let status =
        |key: &str| call(&server, "inference", "POST", "/predictions/m", &bearer(key)).status;
    server.wait_until("it answers", || status("the-first-key") == 200);
    call(
        &server,
        "management",
        "GET",
        "/models",
        &bearer("management-key"),
    )
    .expect(200);
    assert_eq!(status("management-key"), 400);
    // Old and new together, until all clients have the new one.
    write(json!([{"key": "the-first-key"}, {"key": "the-second-key"}]));
    server.wait_until("the new key is good", || status("the-second-key") == 200);
    assert_eq!(status("the-first-key"), 200);
    write(json!({"key": "the-second-key"}));
    server.wait_until("the old key is not", || status("the-first-key") == 400);
    assert_eq!(status("the-second-key"), 200);
    let header = bearer("key-of-the-api");
    let answer = call(
        &server,
        "management",
        "GET",
        "/token?type=inference",
        &header,
    )
    .expect(400);
    assert!(message(&answer).contains("`token_file`"), "{answer:?}");
    assert!(
        !server.folder().join("key_file.json").exists(),
        "never written"
    );
    let text = fs_err::read_to_string(&file).unwrap();
    assert!(!server.output().contains("second-key") && text.contains("second-key"));
}

#[test]
fn keys_come_from_the_environment_where_the_folder_cannot_be_written() {
    let server = with_tokens()
        .env("TS_INFERENCE_TOKEN", "of-inference-1,of-inference-2")
        .env("TS_MANAGEMENT_TOKEN", "of-management")
        .start();
    let status =
        |path: &str, api: &str, key: &str| call(&server, api, "GET", path, &bearer(key)).status;
    for key in ["of-inference-1", "of-inference-2"] {
        server.wait_until("it answers", || status("/ping", "inference", key) == 200);
        assert_eq!(status("/models", "management", key), 400);
    }
    assert_eq!(status("/models", "management", "of-management"), 200);
    assert!(!server.folder().join("key_file.json").exists());
    for (variable, text) in [
        ("TS_INFERENCE_TOKEN", "short"),
        ("TS_MANAGEMENT_TOKEN", "two words"),
    ] {
        let (status, output) = with_tokens().env(variable, text).start_and_fail();
        assert!(!status.success() && !output.contains(text), "{output}");
        assert!(output.contains("token"), "{output}");
    }
    let (status, output) = with_tokens()
        .env("TS_TOKEN_FILE", "/no/such/file")
        .start_and_fail();
    assert!(
        !status.success() && output.contains("/no/such/file"),
        "{output}"
    );
}
