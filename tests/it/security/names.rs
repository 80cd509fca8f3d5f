//! Names out of requests that would be paths if they were taken at their word.

use ts_test::Running;

use super::message;
use crate::server;
use crate::sources::{encoded, names};

fn odd_names() -> Vec<String> {
    let names = [
        "..",
        ".",
        "../../x",
        "a/b",
        "/etc/passwd",
        "..\\..\\x",
        "-x",
        ".hidden",
        "a\0b",
        "a\nb",
    ];
    let long = "n".repeat(300);
    names.into_iter().map(str::to_owned).chain([long]).collect()
}

/// As much of the answers as must not differ.
fn told(server: &Running, name: &str) -> Vec<(u16, String)> {
    let name = encoded(name);
    let calls = [
        server.manage("GET", &format!("/models/{name}")),
        server.manage("PUT", &format!("/models/{name}?min_worker=1")),
        server.manage("DELETE", &format!("/models/{name}")),
        server.manage("GET", &format!("/models/m/{name}")),
        server.manage("PUT", &format!("/models/m/{name}/set-default")),
        server.infer("POST", &format!("/predictions/{name}")),
        server.infer("POST", &format!("/predictions/m/{name}")),
        server.infer("POST", &format!("/v1/models/{name}:predict")),
        server.manage("POST", &format!("/models?url=m&model_name={name}")),
    ];
    let answers = calls.into_iter().map(ts_test::Request::send);
    answers
        .map(|answer| (answer.status, answer.text()))
        .collect()
}

#[test]
fn a_name_is_never_a_path_and_tells_nothing_of_the_disk_se_08() {
    let server = server()
        .echo_model("m", "minWorkers: 1\nmaxWorkers: 1")
        .args(&["--models", "m"])
        .start();
    server.wait_ready("m");
    let before = names(server.folder());
    for name in odd_names() {
        for (status, text) in told(&server, &name) {
            assert!((400..500).contains(&status), "{name:?}: {status} {text}");
            assert!(!text.contains("No such file"), "{name:?}: {text}");
        }
    }
    // What is there and what is not are told alike.
    let place = |name: &str| format!("../{name}");
    fs_err::write(server.folder().join("there"), "").unwrap();
    let (there, not) = (
        told(&server, &place("there")),
        told(&server, &place("nono?")),
    );
    for (there, not) in there.iter().zip(&not) {
        assert_eq!(there.0, not.0);
        assert_eq!(there.1.replace("there", "nono?"), not.1);
    }
    fs_err::remove_file(server.folder().join("there")).unwrap();
    assert_eq!(names(server.folder()), before);
}

#[test]
fn a_url_that_is_a_path_finds_models_only_se_04() {
    let server = server().start();
    fs_err::write(server.folder().join("secret.mar"), "x").unwrap();
    let beside = server.folder().display().to_string();
    for url in [
        "../secret.mar".to_owned(),
        "..\\secret.mar".to_owned(),
        "store/../../secret.mar".to_owned(),
        "%2e%2e/secret.mar".to_owned(),
        "..%2fsecret.mar".to_owned(),
        format!("{beside}/secret.mar"),
        format!("{beside}/store/../secret.mar"),
        "/etc/passwd".to_owned(),
        "/proc/self/environ".to_owned(),
        beside,
        "/".to_owned(),
        ".".to_owned(),
    ] {
        let path = format!("/models?url={}", encoded(&url));
        let answer = server.manage("POST", &path).send();
        assert!(
            (400..500).contains(&answer.status),
            "{url}: {}",
            answer.text()
        );
        let absent = url.replace("secret", "absent");
        let path = format!("/models?url={}", encoded(&absent));
        let not = server.manage("POST", &path).send();
        assert_eq!(
            (answer.status, message(&answer).replace("secret", "absent")),
            (not.status, message(&not)),
            "{url}"
        );
    }
    assert!(names(&server.folder().join("store")).is_empty());
}

/// SE-11: TorchServe takes such names, and so they are names here; nothing that sees them is a shell.
#[test]
fn no_name_is_run_se_11() {
    let server = server().echo_model("m", "").start();
    for name in [
        "m;touch canary",
        "$(touch canary)",
        "`touch canary`",
        "'\"m",
        "m\ntouch canary",
    ] {
        let model = encoded(name);
        let path = format!("/models?url=m&initial_workers=1&model_name={model}");
        let status = server.manage("POST", &path).send().status;
        assert_eq!(
            status,
            if name.contains('\n') { 400 } else { 200 },
            "{name}"
        );
        server
            .infer("POST", &format!("/predictions/{model}"))
            .body("x")
            .send();
        server.manage("DELETE", &format!("/models/{model}")).send();
        let path = format!("/models?url=m&initial_workers=1&handler={model}");
        server.manage("POST", &path).send();
        server.manage("DELETE", "/models/m").send();
    }
    let found = [
        names(server.folder()),
        names(&server.folder().join("store")),
    ]
    .concat();
    assert!(!found.iter().any(|name| name == "canary"), "{found:?}");
}
