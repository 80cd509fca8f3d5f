//! Archives that must not load, and what is left on disk after them.

use std::path::Path;

use crate::server;

pub(crate) fn files_below(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs_err::read_dir(&folder).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.path());
            } else {
                found.push(entry.path().display().to_string());
            }
        }
    }
    found
}

#[test]
fn damaged_archives_are_refused_and_leave_nothing() {
    let server = server().start();
    let store = server.folder().join("store");
    fs_err::write(store.join("empty.mar"), "").unwrap();
    fs_err::write(store.join("text.mar"), "not a zip at all").unwrap();
    fs_err::write(store.join("text.tar.gz"), "not a tar either").unwrap();
    fs_err::create_dir_all(store.join("bare/MAR-INF")).unwrap();
    fs_err::write(store.join("bare/MAR-INF/MANIFEST.json"), "{ not json").unwrap();
    fs_err::create_dir_all(store.join("no-name/MAR-INF")).unwrap();
    fs_err::write(
        store.join("no-name/MAR-INF/MANIFEST.json"),
        r#"{"runtime": "echo", "model": {"modelVersion": "1.0"}}"#,
    )
    .unwrap();
    for name in ["empty.mar", "text.mar", "text.tar.gz", "bare", "no-name"] {
        let error = server.manage("POST", &format!("/models?url={name}")).send();
        assert_eq!(error.status, 400, "{name}: {}", error.text());
        let message = error.json()["message"].to_string();
        assert!(
            message.contains(name.split('.').next().unwrap()),
            "{name}: {message}"
        );
        let list = server.manage("GET", "/models").send().expect(200).json();
        assert_eq!(list["models"].as_array().unwrap().len(), 0);
    }
    let left = files_below(&server.folder().join("tmp"));
    assert!(
        left.iter()
            .all(|path| path.ends_with(".pid") || path.ends_with(".lock")),
        "{left:?}"
    );
}

#[test]
fn a_missing_name_can_be_given_at_registration() {
    let server = server().start();
    let folder = server.folder().join("store/anon/MAR-INF");
    fs_err::create_dir_all(&folder).unwrap();
    fs_err::write(
        folder.join("MANIFEST.json"),
        r#"{"runtime": "echo", "model": {}}"#,
    )
    .unwrap();
    server
        .manage("POST", "/models?url=anon/&model_name=n&initial_workers=1")
        .send()
        .expect(200);
    server
        .infer("POST", "/predictions/n/1.0")
        .body("x")
        .send()
        .expect(200);
}

#[test]
fn a_file_url_is_copied_into_the_store_and_goes_with_the_model() {
    let server = server().start();
    let outside = server.folder().join("outside.mar");
    // The archiver makes no echo archives, so a tar of a folder stands in; what matters here is
    // the file.
    fs_err::write(&outside, "broken").unwrap();
    let url = format!("file://{}", outside.display());
    server
        .manage("POST", &format!("/models?url={url}"))
        .send()
        .expect(400);
    let store = server.folder().join("store");
    assert!(files_below(&store).is_empty(), "{:?}", files_below(&store));
    assert!(outside.exists());
}

#[test]
fn urls_outside_the_allowed_list_are_refused_without_a_fetch() {
    let server = server()
        .config(r"allowed_urls=http://127\\.0\\.0\\.1:9/ok/.*")
        .start();
    let cases = [
        ("http://127.0.0.1:9/other/m.mar", 404),
        ("file:///etc/passwd", 404),
        ("http://127.0.0.1:9/ok/../m.mar", 404),
        ("http://127.0.0.1:9/ok/%2e%2e/m.mar", 404),
        // Allowed, but nobody listens.
        ("http://127.0.0.1:9/ok/m.mar", 400),
    ];
    for (url, status) in cases {
        let path = format!("/models?url={}", url.replace('%', "%25"));
        let error = server.manage("POST", &path).send();
        assert_eq!(error.status, status, "{url}: {}", error.text());
    }
}
