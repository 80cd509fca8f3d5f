//! Where archives come from: the store, folders, `file://` and HTTP, well and badly served.

use std::io::Write as _;
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use serde_json::json;
use sha2::{Digest as _, Sha256};
use ts_archive::{Entries, Format, Manifest, ManifestModel, MemberPath, Packing, pack};
use ts_test::{Answer, Origin, Running, write_answer, write_head};
use ts_types::{ModelName, Runtime};

use crate::server;

/// An archive of an echo model `m` with some bytes that do not repeat.
pub(crate) fn archive() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let weights = folder.path().join("weights");
    let mut bytes = Vec::new();
    for block in 0..4096_u32 {
        bytes.extend(Sha256::digest(block.to_be_bytes()));
    }
    fs_err::write(&weights, bytes).unwrap();
    let mut entries = Entries::default();
    entries
        .add(MemberPath::parse("weights").unwrap(), weights)
        .unwrap();
    let name = ModelName::new("m").unwrap();
    let manifest = Manifest {
        created_on: None,
        runtime: Runtime::Echo,
        model: ManifestModel {
            model_name: Some("m".to_owned()),
            model_version: Some("1.0".to_owned()),
            ..ManifestModel::default()
        },
        archiver_version: None,
    };
    let packing = Packing {
        name,
        manifest,
        entries,
        format: Format::ZipStore,
        folder: folder.path().to_owned(),
        overwrite: false,
        created: Some(0),
    };
    fs_err::read(pack(&packing, &mut |_| {}).unwrap()).unwrap()
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Everything but letters and digits as `%` and two digits.
pub(crate) fn encoded(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    text.bytes().map(encode).collect()
}

/// Registers a percent-encoded URL; `more` are further parameters, each with its `&`.
pub(crate) fn register(server: &Running, url: &str, more: &str) -> Answer {
    let path = format!("/models?url={}{more}", encoded(url));
    server.manage("POST", &path).send()
}

fn message(answer: &Answer) -> String {
    answer.json()["message"].as_str().unwrap().to_owned()
}

/// What the server has written, once it has said this.
#[track_caller]
pub(crate) fn told(server: &Running, words: &str) -> String {
    server.wait_until(words, || server.output().contains(words));
    server.output()
}

/// Names in a folder, hidden ones too.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let entries = fs_err::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort_unstable();
    names
}

fn store(server: &Running) -> std::path::PathBuf {
    server.folder().join("store")
}

/// Fails unless no model is registered and the store is empty.
#[track_caller]
pub(crate) fn nothing_is_left(server: &Running) {
    assert_eq!(names(&store(server)), [""; 0]);
    let list = server.manage("GET", "/models").send().expect(200).json();
    assert_eq!(list["models"], json!([]));
}

#[test]
fn an_archive_is_stored_under_the_name_in_its_path_and_goes_with_the_model() {
    let server = server().start();
    let archive = archive();
    let origin = Origin::serving(archive.clone());
    let signed = |letter: &str| origin.url(&format!("/a/m.mar?sig={}", letter.repeat(300)));
    register(&server, &signed("x"), "&initial_workers=1").expect(200);
    assert_eq!(names(&store(&server)), ["m.mar"]);
    assert_eq!(fs_err::read(store(&server).join("m.mar")).unwrap(), archive);
    let again = register(&server, &signed("y"), "").expect(500);
    assert_eq!(message(&again), "Model file already exists m.mar");
    assert_eq!(again.json()["type"], "InternalServerException");
    assert_eq!(origin.asked().len(), 1, "refused without a fetch");
    let log = told(&server, "download ended");
    assert!(log.contains("download started") && log.contains(&sha256(&archive)));
    server.wait_until("both calls are logged", || {
        let log = server.output();
        assert!(
            !log.contains("xxxxxxxxxx"),
            "a signature is a secret:\n{log}"
        );
        log.matches("\"POST /models?url=").count() == 2
    });
    server.manage("DELETE", "/models/m").send().expect(200);
    nothing_is_left(&server);
}

#[test]
fn a_url_with_parameters_of_its_own_is_encoded_or_sent_as_json() {
    let archive = archive();
    let origin = Origin::start(move |asked, stream, _| {
        let signed = asked.target == "/m.mar?a=1&b=2&sig=x%2By";
        let status = if signed { "200 OK" } else { "403 Forbidden" };
        write_answer(stream, status, &[], if signed { &archive } else { b"" })
    });
    let server = server().start();
    let url = origin.url("/m.mar?a=1&b=2&sig=x%2By");
    register(&server, &url, "&initial_workers=1").expect(200);
    server.manage("DELETE", "/models/m").send().expect(200);
    let body = json!({"url": url, "initial_workers": 1}).to_string();
    let in_body = |body: String| {
        let request = server.manage("POST", "/models");
        let request = request.header("content-type", "application/json");
        request.body(body).send()
    };
    in_body(body).expect(200);
    server.manage("DELETE", "/models/m").send().expect(200);

    // In a body nothing of the URL can get lost, whatever else is in there.
    let refused = json!({"url": origin.url("/m.mar?a=1"), "sig": "x"}).to_string();
    let refused = in_body(refused).expect(400);
    let text = message(&refused);
    assert!(text.contains("403"), "{text}");
    assert!(!text.contains("percent-encode"), "{text}");
    assert_eq!(
        refused.header("x-warning"),
        Some("unknown member of the body `sig` is ignored")
    );

    let raw = server
        .manage("POST", &format!("/models?url={url}&initial_workers=1"))
        .send();
    let text = message(&raw.expect(400));
    assert!(
        text.starts_with("Failed to download archive from: "),
        "{text}"
    );
    assert!(
        text.contains("403") && text.contains("`b`, `sig`"),
        "{text}"
    );
    assert!(text.contains("percent-encode"), "{text}");
    nothing_is_left(&server);
}

#[test]
fn a_broken_download_goes_on_where_it_broke() {
    let archive = archive();
    let digest = sha256(&archive);
    for (name, version) in [
        ("etag", "\"v1\""),
        ("last-modified", "Mon, 30 Nov 2020 17:00:00 GMT"),
    ] {
        let archive = archive.clone();
        let part = archive.len() / 3;
        let origin = Origin::start(move |asked, stream, _| {
            let start = asked.start();
            let total = archive.len();
            let range = format!("bytes {start}-{}/{total}", total - 1);
            let mut headers = vec![(name, version), ("date", "Mon, 30 Nov 2026 17:00:00 GMT")];
            let status = if start > 0 {
                headers.push(("content-range", &range));
                "206 Partial Content"
            } else {
                "200 OK"
            };
            write_head(stream, status, &headers, Some(total - start))?;
            stream.write_all(&archive[start..(start + part).min(total)])
        });
        let server = server().start();
        register(&server, &origin.url("/m.mar"), &format!("&sha256={digest}")).expect(200);
        let asked = origin.asked();
        assert!(asked.len() > 2, "{asked:?}");
        for asked in &asked[1..] {
            assert!(asked.start() > 0, "{asked:?}");
            assert_eq!(asked.header("if-range"), Some(version));
        }
        told(&server, "download broken off, going on");
    }
}

#[test]
fn a_source_without_ranges_or_with_another_file_begins_anew() {
    let archive = archive();
    let digest = sha256(&archive);
    for version in ["\"v2\"", ""] {
        let archive = archive.clone();
        let origin = Origin::start(move |_, stream, before| {
            if before == 0 {
                write_head(stream, "200 OK", &[("etag", "\"v1\"")], Some(archive.len()))?;
                return stream.write_all(&vec![0; archive.len() / 2]);
            }
            write_answer(stream, "200 OK", &[("etag", version)], &archive)
        });
        let server = server().start();
        register(&server, &origin.url("/m.mar"), &format!("&sha256={digest}")).expect(200);
        assert_eq!(origin.asked().len(), 2);
    }
}

#[test]
fn a_long_download_tells_how_far_it_is() {
    let archive = archive();
    let (tell, told_so) = std::sync::mpsc::channel::<()>();
    let told_so = std::sync::Mutex::new(told_so);
    let origin = Origin::start(move |_, stream, _| {
        write_head(stream, "200 OK", &[], Some(archive.len()))?;
        let mut bytes = archive.iter();
        let told_so = told_so.lock().unwrap();
        let every = Duration::from_millis(50);
        while told_so.recv_timeout(every) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            stream.write_all(bytes.next().map_or(&[], std::slice::from_ref))?;
        }
        stream.write_all(bytes.as_slice())
    });
    let server = server().start();
    std::thread::scope(|scope| {
        let call = scope.spawn(|| register(&server, &origin.url("/m.mar"), ""));
        let log = told(&server, "percent=0");
        let line = log.lines().find(|line| line.contains("percent=")).unwrap();
        assert!(
            line.contains("downloading") && line.contains("total="),
            "{line}"
        );
        tell.send(()).unwrap();
        call.join().unwrap().expect(200);
    });
}

#[test]
fn limits_of_size_and_time_hold() {
    let server = server()
        .config("max_download_size=1000")
        .config("download_timeout=1")
        .start();
    let told = Origin::serving(vec![0; 1001]);
    let silent = Origin::start(|_, stream, _| {
        write_head(stream, "200 OK", &[], None)?;
        stream.write_all(&[0; 2000])
    });
    for origin in [&told, &silent] {
        let error = message(&register(&server, &origin.url("/m.mar"), "").expect(400));
        assert!(
            error.contains("1000 bytes") && error.contains("max_download_size"),
            "{error}"
        );
    }
    let outside = server.folder().join("large.mar");
    fs_err::write(&outside, vec![0; 1001]).unwrap();
    let url = format!("file://{}", outside.display());
    let error = message(&register(&server, &url, "").expect(400));
    assert!(error.contains("max_download_size"), "{error}");

    let (hold, held) = std::sync::mpsc::channel::<()>();
    let held = std::sync::Mutex::new(held);
    let stalled = Origin::start(move |_, stream, _| {
        write_head(stream, "200 OK", &[], Some(100))?;
        stream.write_all(b"x")?;
        let _until_the_end = held.lock().unwrap().recv();
        Ok(())
    });
    let error = message(&register(&server, &stalled.url("/m.mar"), "").expect(400));
    assert!(
        error.contains("limit of 1 s") && error.contains("download_timeout"),
        "{error}"
    );
    drop(hold);
    nothing_is_left(&server);
}

#[test]
fn an_archive_with_another_digest_is_refused() {
    let server = server().start();
    let archive = archive();
    let (digest, other) = (sha256(&archive), "0".repeat(64));
    let origin = Origin::serving(archive.clone());
    let outside = server.folder().join("outside.mar");
    fs_err::write(&outside, &archive).unwrap();
    let refused = |url: &str, more: &str| {
        let error = register(&server, url, more).expect(400);
        let text = message(&error);
        assert!(text.contains(&digest) && text.contains(&other), "{text}");
    };
    for url in [
        origin.url("/m.mar"),
        format!("file://{}", outside.display()),
    ] {
        refused(&url, &format!("&sha256={other}"));
        refused(&format!("{url}#sha256={other}"), "");
        nothing_is_left(&server);
        register(&server, &url, &format!("&sha256={digest}")).expect(200);
        server.manage("DELETE", "/models/m").send().expect(200);
    }
    fs_err::write(store(&server).join("l.mar"), &archive).unwrap();
    refused("l.mar", &format!("&sha256={other}"));
    assert_eq!(names(&store(&server)), ["l.mar"], "what was there stays");
    register(
        &server,
        "l.mar",
        &format!("&sha256={}", digest.to_uppercase()),
    )
    .expect(200);

    server.echo_model("folder", "1.0", "");
    let error = message(&register(&server, "folder", &format!("&sha256={digest}")).expect(400));
    assert!(error.contains("is a folder"), "{error}");
    for bad in ["", "12", &digest[1..]] {
        let error = message(&register(&server, "l.mar", &format!("&sha256={bad}")).expect(400));
        assert!(error.contains("64 hexadecimal digits"), "{error}");
    }
}

#[test]
fn a_start_checks_digests_and_takes_what_the_last_one_brought() {
    let archive = archive();
    let origin = Origin::serving(archive.clone());
    let good = format!("{}#sha256={}", origin.url("/m.mar"), sha256(&archive));
    let bad = format!("bad={}#sha256={}", origin.url("/b.mar"), "0".repeat(64));
    let first = server().args(&["--models", &good, &bad]).start();
    first.describe("m");
    first.manage("GET", "/models/bad").send().expect(404);
    assert_eq!(names(&store(&first)), ["m.mar"]);
    told(&first, "has the sha256");

    let second = server().args(&["--models", &good]);
    fs_err::remove_dir(second.store()).unwrap();
    std::os::unix::fs::symlink(store(&first), second.store()).unwrap();
    let second = second.start();
    second.describe("m");
    assert_eq!(origin.asked().len(), 2, "one for each name");
    told(&second, "not downloaded again");
}

/// SE-13, for the models of the command line: the log, `torchserve config` and the files.
#[test]
fn a_signature_on_the_command_line_is_shown_nowhere() {
    use std::os::unix::fs::PermissionsExt as _;
    let origin = Origin::serving(archive());
    let good = format!("{}?sig=hunter2", origin.url("/m.mar"));
    let bad = format!("n={}?sig=hunter2", origin.url("/folder/"));
    let command = server().snapshots().args(&["--models", &good, &bad]);
    let server = command.clone().start();
    server.describe("m");
    let log = told(&server, "Failed to load model");
    assert!(
        log.contains("Model m loaded") && !log.contains("hunter2"),
        "{log}"
    );
    let store = command.store();
    let store = store.to_str().unwrap();
    let shown = command.run(&["config", "--model-store", store, "--models", &good]);
    assert!(shown.stdout.contains("/m.mar?***"), "{shown:?}");
    assert!(!shown.stdout.contains("hunter2"), "{shown:?}");
    // It has to be kept somewhere: for its owner alone.
    for entry in fs_err::read_dir(server.folder().join("logs/config")).unwrap() {
        let mode = entry.unwrap().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}

#[test]
fn nothing_outside_the_list_is_asked() {
    let inside = Origin::serving(Vec::new());
    let outside = Origin::serving(Vec::new());
    let (port, other) = (inside.address().port(), outside.address().port());
    let server = server()
        .config(&format!(
            r"allowed_urls=http://127\\.0\\.0\\.1:{port}/ok/.*,file:///data/ok/.*"
        ))
        .start();
    let not_listed = [
        format!("http://127.0.0.1:{port}/other/m.mar"),
        format!("http://127.0.0.1:{other}/ok/m.mar"),
        format!("http://127.1:{other}/ok/m.mar"),
        format!("http://2130706433:{other}/ok/m.mar"),
        format!("http://[::1]:{port}/ok/m.mar"),
        format!("http://localhost:{port}/ok/m.mar"),
        format!("http://user@127.0.0.1:{port}/ok/m.mar"),
        format!("http://127.0.0.1:{port}@localhost:{other}/ok/m.mar"),
        format!("http://localhost:{other}/#http://127.0.0.1:{port}/ok/m.mar"),
        format!(r"http://localhost:{other}\@127.0.0.1:{port}/ok/m.mar"),
        format!("https://127.0.0.1:{port}/ok/m.mar"),
        "file:///etc/passwd".to_owned(),
        r"file:\\etc\passwd".to_owned(),
        "s3://bucket/m.mar".to_owned(),
    ];
    for url in not_listed {
        let error = register(&server, &url, "").expect(404);
        assert_eq!(error.json()["type"], "ModelNotFoundException", "{url}");
        let known = message(&error) == format!("Given URL {url} does not match any allowed URL(s)")
            || message(&error) == format!("Model not found at: {url}");
        assert!(known, "{}", message(&error));
    }
    let climbing = [
        "file:///data/ok/../secret/m.mar",
        "file:///data/ok/%2e%2e/secret/m.mar",
        "file:///data/ok/%252e%252e/secret/m.mar",
        "file:///data/ok/%25252e%25252e/secret/m.mar",
        "file:///data/ok/..;/secret/m.mar",
        r"file:///data/ok\..\secret\m.mar",
        "file:///data/ok/..%5csecret/m.mar",
        "file:///data/ok//../secret/m.mar",
        "http://127.0.0.1:1/ok/..%2fother/m.mar",
        "../m.mar",
        "%2e%2e/m.mar",
    ];
    for url in climbing {
        let error = register(&server, url, "").expect(404);
        assert_eq!(
            message(&error),
            format!("Relative path is not allowed in url: {url}")
        );
    }
    assert_eq!((inside.asked().len(), outside.asked().len()), (0, 0));
    nothing_is_left(&server);
}

#[test]
fn metadata_services_are_not_asked_though_the_list_has_everything() {
    let server = server().start();
    for url in [
        "http://169.254.169.254/latest/m.mar",
        "http://2852039166/m.mar",
        "http://[::ffff:169.254.169.254]/m.mar",
        "http://metadata.google.internal/m.mar",
        "https://user:word@example.org/m.mar",
    ] {
        let error = register(&server, url, "").expect(404);
        assert!(message(&error).starts_with("Given URL "), "{url}");
    }
}

#[test]
fn redirects_are_checked_at_every_hop() {
    let target = Origin::serving(archive());
    let away = target.url("/ok/m.mar");
    let archive = archive();
    let origin = Origin::start(move |asked, stream, _| match asked.target.as_str() {
        "/ok/away/m.mar" => write_answer(stream, "302 Found", &[("location", &away)], b""),
        "/ok/over/m.mar" => write_answer(stream, "302 Found", &[("location", "/other/m.mar")], b""),
        "/ok/loop/m.mar" => {
            write_answer(stream, "302 Found", &[("location", "/ok/loop/m.mar")], b"")
        }
        "/ok/near/m.mar" => {
            write_answer(stream, "302 Found", &[("location", "/ok/there.mar")], b"")
        }
        _ => write_answer(stream, "200 OK", &[], &archive),
    });
    let port = origin.address().port();
    let server = server()
        .config(&format!(
            r"allowed_urls=http://127\\.0\\.0\\.1:{port}/ok/.*"
        ))
        .start();
    for (path, words) in [
        ("/ok/away/m.mar", "does not match any allowed URL"),
        ("/ok/over/m.mar", "does not match any allowed URL"),
        ("/ok/loop/m.mar", "redirects"),
    ] {
        let error = message(&register(&server, &origin.url(path), "").expect(400));
        assert!(error.contains(words), "{path}: {error}");
    }
    assert_eq!(target.asked().len(), 0);
    assert!(
        origin
            .asked()
            .iter()
            .all(|asked| asked.target.starts_with("/ok/"))
    );
    nothing_is_left(&server);
    register(&server, &origin.url("/ok/near/m.mar"), "").expect(200);
    assert_eq!(
        names(&store(&server)),
        ["m.mar"],
        "by the name that was asked for"
    );
}

#[test]
fn what_is_no_source_is_told_so() {
    let origin = Origin::serving(archive());
    let server = server().start();
    for url in [
        "ftp://h/m.mar",
        "gopher://h/m.mar",
        r"C:\models\m.mar",
        "D:/models/m.mar",
    ] {
        let error = message(&register(&server, url, "").expect(400));
        for known in ["`http`", "`https`", "`file`", "`s3`", "`gs`", "`az`"] {
            assert!(error.contains(known), "{url}: {error}");
        }
    }
    for url in ["", "%20", ".", "/", "none.mar", ".hidden"] {
        let path = format!("/models?url={url}&model_name=x");
        let error = server.manage("POST", &path).send().expect(404);
        assert_eq!(error.json()["type"], "ModelNotFoundException", "{url}");
    }
    for folder in [store(&server).as_path(), server.folder()] {
        register(&server, &folder.display().to_string(), "&model_name=x").expect(404);
    }
    for path in ["/", "/.hidden", "/a%2Fb"] {
        register(&server, &origin.url(path), "").expect(400);
    }
    nothing_is_left(&server);
    let upper = origin.url("/m.mar").replace("http", "HTTP");
    register(&server, &upper, "").expect(200);
}

#[test]
fn files_links_and_folders_are_found() {
    let server = server().start();
    let archive = archive();
    let outside = server.folder().join("outside");
    fs_err::create_dir_all(outside.join("wrapped")).unwrap();
    fs_err::write(outside.join("real.mar"), &archive).unwrap();
    let store = store(&server);
    std::os::unix::fs::symlink(outside.join("real.mar"), store.join("link.mar")).unwrap();
    server.echo_model("folder", "1.0", "");
    let copy = |to: &Path| {
        fs_err::create_dir_all(to.join("MAR-INF")).unwrap();
        let manifest = "MAR-INF/MANIFEST.json";
        fs_err::copy(store.join("folder").join(manifest), to.join(manifest)).unwrap();
    };
    copy(&outside.join("elsewhere"));
    copy(&outside.join("wrapped/inner"));
    copy(&store.join("sub/deep"));
    let urls = [
        "link.mar".to_owned(),
        "folder".to_owned(),
        "folder/".to_owned(),
        store.join("folder").display().to_string(),
        format!("{}/", store.join("folder").display()),
        "sub/deep".to_owned(),
        outside.join("elsewhere").display().to_string(),
        format!("{}/", outside.join("elsewhere").display()),
        outside.join("wrapped").display().to_string(),
    ];
    let before = names(&store);
    for url in urls {
        let answer = register(&server, &url, "&model_name=x");
        assert_eq!(answer.status, 200, "{url}: {}", answer.text());
        assert_eq!(server.describe("x")["modelUrl"], url);
        server.manage("DELETE", "/models/x").send().expect(200);
    }
    assert_eq!(names(&store), before, "what the operator has stays");
    assert!(outside.join("elsewhere/MAR-INF/MANIFEST.json").exists());

    let url = format!("file://{}", outside.join("real.mar").display());
    register(&server, &url, "").expect(200);
    assert!(store.join("real.mar").exists());
    let again = register(&server, &url, "").expect(500);
    assert_eq!(message(&again), "Model file already exists real.mar");
    server.manage("DELETE", "/models/m").send().expect(200);
    assert!(!store.join("real.mar").exists() && outside.join("real.mar").exists());
}

#[test]
fn of_two_registrations_at_once_one_wins() {
    let archive = archive();
    // Both have begun before either ends.
    let both = Arc::new(Barrier::new(2));
    let origin = Origin::start(move |_, stream, _| {
        write_head(stream, "200 OK", &[], Some(archive.len()))?;
        both.wait();
        stream.write_all(&archive)
    });
    let server = server().start();
    let url = origin.url("/m.mar");
    let mut answers = std::thread::scope(|scope| {
        let calls = [(); 2].map(|()| scope.spawn(|| register(&server, &url, "")));
        calls.map(|call| call.join().unwrap())
    });
    answers.sort_by_key(|answer| answer.status);
    let [won, lost] = answers;
    won.expect(200);
    assert_eq!(
        message(&lost.expect(500)),
        "Model file already exists m.mar"
    );
    assert_eq!(names(&store(&server)), ["m.mar"]);
}

#[test]
fn what_a_killed_server_was_writing_is_swept_by_the_next() {
    let (hold, held) = std::sync::mpsc::channel::<()>();
    let held = std::sync::Mutex::new(held);
    let stalled = Origin::start(move |_, stream, _| {
        write_head(stream, "200 OK", &[], Some(100))?;
        stream.write_all(b"half")?;
        let _until_the_end = held.lock().unwrap().recv();
        Ok(())
    });
    let mut killed = server().start();
    let url = stalled.url("/m.mar");
    std::thread::scope(|scope| {
        let path = format!("/models?url={}", encoded(&url));
        let request = killed.manage("POST", &path);
        let call = scope.spawn(move || request.try_send().is_err());
        killed.wait_until("a part is there", || {
            let left = names(&store(&killed));
            matches!(left.as_slice(), [name] if name.starts_with('.') && name.ends_with(".part"))
        });
        // Another server that starts meanwhile leaves it alone.
        let beside = server();
        fs_err::remove_dir(beside.store()).unwrap();
        std::os::unix::fs::symlink(store(&killed), beside.store()).unwrap();
        let beside = beside.args(&["--models", "all"]).start();
        assert_eq!(names(&store(&beside)).len(), 1);
        nothing_is_served(&beside);
        killed.signal(rustix::process::Signal::KILL);
        assert!(call.join().unwrap());
    });
    killed.wait_for_exit(Duration::from_secs(10));
    let next = server();
    fs_err::remove_dir(next.store()).unwrap();
    std::os::unix::fs::symlink(store(&killed), next.store()).unwrap();
    let next = next.start();
    nothing_is_left(&next);
    told(&next, "removed 1 unfinished download");
    drop(hold);
}

fn nothing_is_served(server: &Running) {
    let list = server.manage("GET", "/models").send().expect(200).json();
    assert_eq!(list["models"], json!([]));
}

#[test]
fn a_store_that_cannot_be_written_is_told_by_its_place() {
    let origin = Origin::serving(archive());
    let server = server().start();
    fs_err::remove_dir(store(&server)).unwrap();
    let error = register(&server, &origin.url("/m.mar"), "").expect(500);
    let (text, place) = (message(&error), store(&server).display().to_string());
    assert!(
        text.contains("model store") && text.contains(&place),
        "{text}"
    );
    nothing_is_served(&server);
}
