//! The log files, what stands in them, and what may change while the server runs.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use ts_test::Running;

use crate::{server, serving};

const FILES: [&str; 3] = ["access_log.log", "model_log.log", "ts_log.log"];
const METRICS_FILES: [&str; 2] = ["ts_metrics.log", "model_metrics.log"];

fn log(server: &Running, name: &str) -> String {
    fs_err::read_to_string(server.folder().join("logs").join(name)).unwrap_or_default()
}

/// Waits for a line of a file and returns the first one.
#[track_caller]
fn line_with(server: &Running, name: &str, text: &str) -> String {
    let find = || {
        let lines = log(server, name);
        lines
            .lines()
            .find(|line| line.contains(text))
            .map(str::to_owned)
    };
    server.wait_until(text, || find().is_some());
    find().unwrap()
}

fn predict(server: &Running, id: &str) {
    let request = server.infer("POST", "/predictions/m").body("x");
    request.header("x-request-id", id).send().expect(200);
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs_err::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.collect()
}

#[test]
fn the_five_files_are_there_from_the_start() {
    for line in ["", "async_logging=true", "async_logging=perhaps"] {
        let server = server().config(line).start();
        for name in FILES.iter().chain(&METRICS_FILES) {
            assert!(
                server.folder().join("logs").join(name).exists(),
                "{name} with `{line}`"
            );
        }
    }
}

#[test]
fn two_variables_name_their_folders() {
    let plain = server();
    let folder = |name: &str| plain.folder().join(name).to_str().unwrap().to_owned();
    let (logs, metrics) = (folder("a/logs"), folder("b"));
    let server = plain
        .clone()
        .env("LOG_LOCATION", &logs)
        .env("METRICS_LOCATION", &metrics)
        .start();
    for (folder, files) in [(&logs, &FILES[..]), (&metrics, &METRICS_FILES[..])] {
        let found = names(Path::new(folder));
        assert!(
            files.iter().all(|name| found.contains(&(*name).to_owned())),
            "{found:?}"
        );
    }
    assert!(!server.folder().join("logs").exists());
}

#[test]
fn a_folder_that_cannot_be_written_is_told_and_the_server_starts() {
    let plain = server();
    let taken = plain.folder().join("taken");
    fs_err::write(&taken, "").unwrap();
    let server = plain.env("LOG_LOCATION", taken.to_str().unwrap()).start();
    server.infer("GET", "/ping").send().expect(200);
    server.wait_until("it is told", || server.output().contains("GET /ping"));
    assert_eq!(
        server
            .output()
            .matches("`LOG_LOCATION` names another folder")
            .count(),
        1
    );
}

#[test]
fn each_line_is_once_in_its_file_and_once_on_the_console_lg_02() {
    let server = serving("");
    predict(&server, "mine-1");
    let line = line_with(&server, "access_log.log", "/predictions/m");
    let shape = regex::Regex::new(
        r#"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - /127\.0\.0\.1:\d+ "POST /predictions/m HTTP/1\.1" 200 \d+ request_id=mine-1$"#,
    );
    assert!(shape.unwrap().is_match(&line), "{line}");
    let message = line.split_once(" - ").unwrap().1;
    server.wait_until("the console has it", || server.output().contains(message));
    assert_eq!(server.output().matches(message).count(), 1);
    assert_eq!(log(&server, "access_log.log").matches(message).count(), 1);
    let started = line_with(&server, "ts_log.log", "Torchserve version");
    let shape = r"^\S+,\d{3} \[INFO \] \S+ ts_server::\S+ - Torchserve version: ";
    assert!(
        regex::Regex::new(shape).unwrap().is_match(&started),
        "{started}"
    );
    assert_eq!(
        log(&server, "ts_log.log")
            .matches("Torchserve version")
            .count(),
        1
    );
    assert!(!log(&server, "ts_log.log").contains("ACCESS_LOG"));
    assert!(!server.output().contains("are missing here"));
}

#[test]
fn nothing_is_lost_at_an_orderly_end() {
    let server = serving("");
    for number in 0..200 {
        predict(&server, &format!("number-{number}"));
    }
    let folder = server.folder().to_owned();
    let stopped = server.stop_in_order();
    let lines = fs_err::read_to_string(folder.join("logs/access_log.log")).unwrap();
    for number in 0..200 {
        let id = format!(" request_id=number-{number}\n");
        assert_eq!(lines.matches(&id).count(), 1, "{id}");
    }
    let told = fs_err::read_to_string(folder.join("logs/ts_log.log")).unwrap();
    assert!(
        told.contains("every accepted request was answered"),
        "{told}"
    );
    drop(stopped);
}

#[test]
fn full_files_are_compressed_and_the_oldest_go() {
    let server = server()
        .echo_model("m", "minWorkers: 1\nmaxWorkers: 1")
        .args(&["--models", "m"])
        .config("log_file_size=4096")
        .config("log_files_kept=2")
        .start();
    server.wait_ready("m");
    let logs = server.folder().join("logs");
    let compressed = || -> Vec<PathBuf> {
        let all = names(&logs).into_iter();
        let of_access = all.filter(|name| name.starts_with("access_log.") && name.ends_with(".gz"));
        of_access.map(|name| logs.join(name)).collect()
    };
    let pattern = regex::Regex::new(r"/access_log\.\d\d-[A-Z][a-z]{2}(\.\d+)?\.log\.gz$").unwrap();
    let number = std::cell::Cell::new(0);
    server.wait_until("the third is there and the first is gone", || {
        predict(
            &server,
            &format!("number-{}", number.replace(number.get() + 1)),
        );
        let found = compressed();
        assert!(
            found
                .iter()
                .all(|path| pattern.is_match(path.to_str().unwrap())),
            "{found:?}"
        );
        found.len() == 2
            && found
                .iter()
                .any(|path| path.to_str().unwrap().ends_with(".2.log.gz"))
    });
    let bytes = fs_err::metadata(logs.join("access_log.log")).unwrap().len();
    assert!(bytes <= 4096, "{bytes}");
}

#[test]
fn a_file_that_was_moved_away_is_opened_again() {
    let server = serving("");
    predict(&server, "before");
    line_with(&server, "access_log.log", "request_id=before");
    let logs = server.folder().join("logs");
    fs_err::rename(logs.join("access_log.log"), logs.join("moved")).unwrap();
    predict(&server, "after");
    line_with(&server, "access_log.log", "request_id=after");
    assert!(!log(&server, "moved").contains("request_id=after"));
}

#[test]
fn json_has_an_object_on_every_line_of_every_file_and_the_console() {
    let server = server()
        .echo_model("m", "minWorkers: 1\nmaxWorkers: 1")
        .args(&["--models", "m"])
        .config("log_format=json")
        .start();
    server.wait_ready("m");
    predict(&server, "mine-1");
    let line = line_with(&server, "access_log.log", "mine-1");
    let found: Value = serde_json::from_str(&line).unwrap();
    for (name, value) in [
        ("logger", json!("ACCESS_LOG")),
        ("level", json!("INFO")),
        ("method", json!("POST")),
        ("path", json!("/predictions/m")),
        ("status", json!(200)),
        ("bytes", json!(1)),
        ("request_id", json!("mine-1")),
    ] {
        assert_eq!(found[name], value, "{line}");
    }
    assert!(found["ms"].is_u64() && found["peer"].is_string() && found["thread"].is_string());
    let shape = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d$";
    let timestamp = found["timestamp"].as_str().unwrap();
    assert!(
        regex::Regex::new(shape).unwrap().is_match(timestamp),
        "{timestamp}"
    );
    server.wait_until("the console has it", || server.output().contains("mine-1"));
    assert!(server.output().contains("Model server started."));
    for text in FILES
        .map(|name| log(&server, name))
        .into_iter()
        .chain([server.output()])
    {
        for line in text.lines() {
            let parsed = serde_json::from_str::<Value>(line);
            assert!(
                parsed.is_ok_and(|line| line["message"].is_string()),
                "{line}"
            );
        }
    }
}

#[test]
fn what_is_logged_can_be_changed_while_the_server_runs() {
    let server = serving("");
    let filter = |answer: ts_test::Answer| answer.expect(200).json()["filter"].clone();
    assert_eq!(filter(server.manage("GET", "/logging").send()), "info");
    let change = |filter: &str| {
        let path = format!("/logging?filter={filter}");
        server
            .manage("PUT", &path)
            .header("x-request-id", "changing")
            .send()
    };
    assert_eq!(filter(change("info,ACCESS_LOG=off")), "info,ACCESS_LOG=off");
    let told = line_with(&server, "ts_log.log", "log filter changed");
    assert!(
        told.contains("from `info` to `info,ACCESS_LOG=off` by /127.0.0.1:"),
        "{told}"
    );
    assert!(told.ends_with(" request_id=changing"), "{told}");
    predict(&server, "unseen");
    let body = json!({"filter": "off"}).to_string();
    let request = server.manage("PUT", "/logging").body(body);
    assert_eq!(
        filter(request.header("content-type", "application/json").send()),
        "off"
    );
    // Also what no filter lets through is told.
    line_with(&server, "ts_log.log", "to `off`");
    assert_eq!(filter(change("debug")), "debug");
    predict(&server, "seen");
    line_with(&server, "access_log.log", "request_id=seen");
    assert!(!log(&server, "access_log.log").contains("unseen"));
    for (wrong, reason) in [
        ("inof", "`inof` is none of the levels"),
        ("a%3Dloud", "`a=loud`: error parsing"),
        ("", "`filter` is missing"),
    ] {
        let refused = change(wrong).expect(400).text();
        assert!(refused.contains(reason), "{refused}");
    }
    assert_eq!(filter(server.manage("GET", "/logging").send()), "debug");
    server.infer("GET", "/logging").send().expect(404);
    server.manage("POST", "/logging").send().expect(405);
}

#[test]
fn changing_what_is_logged_needs_the_management_token() {
    let server = server().with_default_safety().start();
    for method in ["GET", "PUT"] {
        server
            .manage(method, "/logging?filter=off")
            .send()
            .expect(400);
    }
}

#[test]
fn the_callers_address_is_what_a_trusted_proxy_says_lg_03() {
    for (trusted, address) in [("", "127.0.0.1:"), ("127.0.0.0/8", "203.0.113.9 ")] {
        let server = server()
            .config(&format!("trusted_proxies={trusted}"))
            .start();
        let forged = "1.1.1.1\u{1b}[31m, 203.0.113.9";
        for (name, value) in [
            ("x-forwarded-for", "1.1.1.1, 203.0.113.9"),
            ("user-agent", "a\tb"),
        ] {
            let request = server.infer("GET", "/ping").header(name, value);
            request.header("x-request-id", name).send().expect(200);
        }
        let line = line_with(&server, "access_log.log", "request_id=x-forwarded-for");
        assert!(line.contains(&format!(" - /{address}")), "{line}");
        assert!(!line.contains(forged));
        let line = line_with(&server, "access_log.log", "request_id=user-agent");
        assert!(line.contains(" - /127.0.0.1:"), "{line}");
    }
}

#[test]
fn no_path_makes_a_line_of_its_own_lg_03() {
    let server = server().config("log_filter=debug").start();
    let path = "/predictions/x%0d%0a2026-01-01T00:00:00,000%20[ERROR]%20forged%1b[31m%c2%9b";
    server.infer("POST", path).body("x").send().expect(400);
    let request = server.manage("POST", "/models?url=a%0Aforged.mar&model_name=b%0Aforged");
    request.send();
    line_with(&server, "access_log.log", "POST /models");
    for name in FILES {
        let text = log(&server, name);
        assert!(
            !text.contains(|c: char| c.is_control() && c != '\n'),
            "{text:?}"
        );
        assert!(
            text.lines().all(|line| !line.contains("forged")
                || line.contains("POST")
                || line.contains(" - ")),
            "{text}"
        );
        assert!(
            !text
                .lines()
                .any(|line| line.starts_with("2026-01-01T") || line.starts_with("forged"))
        );
    }
}

#[test]
fn the_log_has_what_the_client_is_not_told_under_the_requests_id_se_12() {
    let server = serving("");
    let request = server
        .infer("POST", "/predictions/m")
        .header("x-echo-fault", "abort");
    let answer = request.header("x-request-id", "mine-1").body("x").send();
    assert!(answer.status >= 500, "{}", answer.text());
    let line = line_with(&server, "ts_log.log", "unsuccessful inference 1");
    assert!(
        line.contains(r#"worker="W-"#) && line.ends_with(" request_id=mine-1"),
        "{line}"
    );
    assert!(!answer.text().contains("W-9"), "{}", answer.text());
}

#[test]
fn an_idle_server_with_a_failed_model_says_nothing_more_lg_02() {
    let server = server()
        .echo_model(
            "m",
            "echo:\n  loadError: no weights today\nmaxRetryTimeoutInSec: 1\n",
        )
        .config("metric_time_interval=1")
        .start();
    let request = server.manage("POST", "/models?url=m&initial_workers=1&synchronous=false");
    request.send().expect(202);
    line_with(&server, "ts_log.log", "the worker is not started again");
    // What ends with it is told as well.
    server.wait_without_hosts();
    let before = log(&server, "ts_log.log");
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(log(&server, "ts_log.log"), before);
}

#[test]
fn levels_of_a_log4j_file_are_the_filter() {
    let plain = server();
    let file = plain.folder().join("log4j2.xml");
    let text = r#"<Configuration><Appenders><Console name="c"/></Appenders><Loggers>
        <Logger name="ACCESS_LOG" level="off"/><Root level="info"/></Loggers></Configuration>"#;
    fs_err::write(&file, text).unwrap();
    let shown = file.to_str().unwrap().to_owned();
    let vmargs = format!("vmargs=-Dlog4j.configurationFile=file://{shown}");
    for (line, args, expected) in [
        ("", &["--log-config", &shown][..], "info,ACCESS_LOG=off"),
        (&vmargs[..], &[], "info,ACCESS_LOG=off"),
        ("log_filter=warn", &["--log-config", &shown], "warn"),
    ] {
        let server = plain.clone().config(line).args(args).start();
        let filter = server.manage("GET", "/logging").send().expect(200).json();
        assert_eq!(filter["filter"], expected, "{line}");
        server.wait_until("what is ignored is told", || {
            server.output().contains("ignored: `appenders`")
        });
        assert!(
            !server.output().contains("Java virtual machine"),
            "{}",
            server.output()
        );
    }
}
