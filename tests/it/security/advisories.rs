//! The public advisories on TorchServe, one test each, named after it. The tests of the kinds behind
//! them are wider; `docs/security.md` has the table.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ts_test::{Origin, Running};

use super::{Keys, bearer, message};
use crate::malformed;
use crate::server;
use crate::sources::{archive, encoded, names, nothing_is_left, register, told};

/// Local addresses and ports that a process listens on, from the kernel.
fn listening(pid: u32) -> BTreeSet<(String, u16)> {
    let sockets: BTreeSet<String> = fs_err::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .filter_map(|entry| {
            let link = fs_err::read_link(entry.ok()?.path()).ok()?;
            let link = link.to_string_lossy().into_owned();
            Some(link.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
        })
        .collect();
    let mut found = BTreeSet::new();
    for table in ["tcp", "tcp6"] {
        let text = fs_err::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        for line in text.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (local, state, inode) = (fields[1], fields[3], fields[9]);
            // 0A: it listens.
            if state == "0A" && sockets.contains(inode) {
                let (address, port) = local.split_once(':').unwrap();
                let port = u16::from_str_radix(port, 16).unwrap();
                found.insert((address.to_owned(), port));
            }
        }
    }
    found
}

fn port(address: &str) -> u16 {
    address.rsplit(':').next().unwrap().parse().unwrap()
}

/// SE-05: 127.0.0.1 in the form of the kernel, and nothing else.
#[test]
fn cve_2024_35199_every_port_is_on_loopback_by_default() {
    let server = server().start();
    let found = listening(server.pid());
    let ports: BTreeSet<u16> = found.iter().map(|(_, port)| *port).collect();
    for address in [&server.inference, &server.management, &server.metrics] {
        assert!(ports.contains(&port(address)), "{found:?}");
    }
    assert!(
        found.iter().all(|(address, _)| address == "0100007F"),
        "{found:?}"
    );
    // What is not said in the file is on loopback too.
    let table = crate::server().run(&["config", "--json", "--model-store", "store"]);
    let table: serde_json::Value = serde_json::from_str(&table.stdout).unwrap();
    for key in table["settings"].as_array().unwrap() {
        let name = key["key"].as_str().unwrap();
        if name.ends_with("_address") {
            let value = key["value"].as_str().unwrap();
            assert!(value.contains("127.0.0.1"), "{name} is {value}");
        }
    }
    let open = crate::server()
        .config("metrics_address=http://0.0.0.0:0")
        .start();
    told(&open, "is open to every network");
}

/// ShellTorch: an open management API that fetches from anywhere. SE-03 has the list of addresses.
#[test]
fn cve_2023_43654_a_default_server_fetches_for_nobody() {
    let origin = Origin::serving(archive());
    let url = origin.url("/m.mar");
    let server = server().with_default_safety().start();
    told(&server, "can access any URL to load models");
    let path = format!("/models?url={}", encoded(&url));
    let refused = server.manage("POST", &path).send().expect(400);
    assert_eq!(refused.json()["type"], "InvalidKeyException");
    let keys = Keys::of(&server);
    let call = server
        .manage("POST", &path)
        .header("authorization", &bearer(&keys.management));
    call.send().expect(405);
    // With all of it switched on, the list decides, and never lets anybody near metadata services.
    let open = crate::server()
        .config(r"allowed_urls=http://127\\.0\\.0\\.1:1/.*")
        .start();
    for url in [&url, "http://169.254.169.254/m.mar"] {
        register(&open, url, "").expect(404);
    }
    assert!(origin.asked().is_empty());
    nothing_is_left(&open);
}

/// SE-15: plain data only, bounded, with file and line.
#[test]
fn cve_2022_1471_configuration_builds_nothing() {
    let canary = tempfile::tempdir().unwrap();
    let canary = canary.path().join("canary");
    let place = canary.display();
    let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..10 {
        let items = vec![format!("*a{}", level - 1); 10].join(", ");
        bomb.push_str(&format!("a{level}: &a{level} [{items}]\n"));
    }
    let merge = format!("{bomb}b:\n  <<: *a9\n");
    let nested = format!("a: {}{}", "[".repeat(100_000), "]".repeat(100_000));
    let refused = [
        (
            format!("minWorkers: 1\na: !!python/object/apply:os.mkdir ['{place}']\n"),
            2,
        ),
        (format!("a: !!python/name:os.system\nb: {place}\n"), 1),
        (
            "a: !!javax.script.ScriptEngineManager [!!java.net.URLClassLoader [[]]]\n".to_owned(),
            1,
        ),
        ("a: 1\n\na: 2\n".to_owned(), 3),
        (bomb, 0),
        (merge, 0),
        (nested, 0),
        ("a: 1\nb: [\n".to_owned(), 0),
        (format!("a: {}", "x".repeat(1 << 20)), 0),
    ];
    let server = server().start();
    let before = resident(&server);
    let started = Instant::now();
    for (index, (yaml, line)) in refused.iter().enumerate() {
        let model = format!("m{index}");
        server.echo_model(&model, "1.0", yaml);
        let error = message(&register(&server, &model, "").expect(400));
        assert!(error.contains("`model-config.yaml`"), "{index}: {error}");
        if *line > 0 {
            assert!(error.contains(&format!("line {line} ")), "{index}: {error}");
        }
    }
    assert!(
        started.elapsed() < Duration::from_secs(30),
        "{:?}",
        started.elapsed()
    );
    assert!(resident(&server) < before + (100 << 20), "memory is flat");
    assert!(!canary.exists());
    // A scalar of nearly the limit, and anchors that expand to little, are data like any other.
    let long = "x".repeat((1 << 20) - 100);
    server.echo_model("long", "1.0", &format!("minWorkers: 1\na: {long}\n"));
    register(&server, "long", "").expect(200);
    server.echo_model("anchors", "1.0", "a: &a {x: 1}\nb: *a\nc:\n  <<: *a\n");
    register(&server, "anchors", "").expect(200);
}

fn resident(server: &Running) -> u64 {
    let text = fs_err::read_to_string(format!("/proc/{}/statm", server.pid())).unwrap();
    let pages: u64 = text.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

/// SE-01, with the neighbour whose name begins like the folder's own, which a test of prefixes lets
/// through.
#[test]
fn cve_2023_48299_nothing_is_unpacked_elsewhere() {
    let server = server().start();
    let before = names(server.folder());
    let absolute = server.folder().join("absolute").display().to_string();
    let evil = [
        "../../x",
        "../x",
        "a/../../x",
        "..\\..\\x",
        "a/..\\..\\x",
        "..",
        "C:\\x",
        "a\0b",
        "../model-neighbour/x",
        absolute.as_str(),
    ];
    for name in evil {
        for ending in ["mar", "tar.gz", "tgz"] {
            if name.contains('\0') && ending != "mar" {
                // Ends the name there.
                continue;
            }
            let file = format!("evil.{ending}");
            let bytes = malformed::escaping(name, ending);
            fs_err::write(server.folder().join("store").join(&file), bytes).unwrap();
            let answer = register(&server, &file, "");
            assert_eq!(answer.status, 400, "{name:?} in {file}: {}", answer.text());
            fs_err::remove_file(server.folder().join("store").join(&file)).unwrap();
        }
    }
    assert_eq!(names(server.folder()), before);
    let work: Vec<_> = names(&server.folder().join("tmp"));
    for folder in work
        .iter()
        .filter(|name| name.starts_with("models-") && !name.ends_with(".lock"))
    {
        assert!(
            names(&server.folder().join("tmp").join(folder)).is_empty(),
            "{folder}"
        );
    }
    nothing_is_left(&server);
}

/// SE-04: what climbs is refused before anything is looked up, also where the file is in the store
/// already.
#[test]
fn cve_2024_35198_an_allowed_beginning_lets_nothing_climb() {
    let server = server();
    let outside = server.folder().join("secret");
    fs_err::create_dir(&outside).unwrap();
    fs_err::write(outside.join("m.mar"), archive()).unwrap();
    let ok = server.folder().join("ok");
    fs_err::create_dir(&ok).unwrap();
    let root = server.folder().display().to_string();
    fs_err::write(server.store().join("m.mar"), archive()).unwrap();
    let server = server
        .config(&format!("allowed_urls=file://{root}/ok/.*"))
        .start();
    for climbing in [
        "../secret",
        "%2e%2e/secret",
        "%252e%252e/secret",
        "%2e%2e%2fsecret",
        "..;/secret",
        "..\\secret",
        "/../secret",
    ] {
        let url = format!("file://{root}/ok/{climbing}/m.mar");
        let answer = register(&server, &url, "").expect(404);
        let text = message(&answer);
        assert_eq!(text, format!("Relative path is not allowed in url: {url}"));
    }
    assert_eq!(names(&server.folder().join("store")), ["m.mar"]);
    let list = server.manage("GET", "/models").send().expect(200);
    assert_eq!(list.json()["models"], serde_json::json!([]));
}
