//! Which archives are taken: digests, signatures, and what their files are.

use std::path::{Path, PathBuf};

use ts_archive::{PrivateKey, UnpackLimits, signature_path, signed};
use ts_test::{Origin, Running, Server, write_answer};

use super::message;
use crate::server;
use crate::sources::{archive, names, nothing_is_left, register, sha256, told};

#[track_caller]
fn refused(server: &Running, url: &str, words: &[&str]) {
    let answer = register(server, url, "").expect(400);
    let text = message(&answer);
    for word in words {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
    assert!(!text.contains("/tmp"), "{text}");
}

/// A server whose store has an archive `l.mar`.
fn with_archive(server: Server) -> Server {
    fs_err::write(server.store().join("l.mar"), archive()).unwrap();
    server
}

#[test]
fn nothing_is_registered_without_a_digest_where_one_is_required() {
    let origin = Origin::serving(archive());
    let digest = sha256(&archive());
    let url = origin.url("/m.mar");
    let models = ["l.mar", &format!("n=l.mar#sha256={digest}")];
    let server = with_archive(
        server()
            .config("require_sha256=true")
            .echo_model("folder", ""),
    )
    .args(&["--models", models[0], models[1]])
    .start();
    told(&server, "Failed to load model");
    server.describe("n");
    for url in [&url, "l.mar", "folder"] {
        refused(&server, url, &["`require_sha256`", "#sha256="]);
    }
    assert!(origin.asked().is_empty(), "refused without a fetch");
    register(&server, &url, &format!("&sha256={digest}")).expect(200);
    refused(
        &server,
        &format!("folder#sha256={digest}"),
        &["is a folder"],
    );
}

#[test]
fn only_listed_archives_are_taken() {
    let server = with_archive(server());
    let list = server.folder().join("digests");
    let other = [archive(), vec![0]].concat();
    fs_err::write(server.store().join("other.mar"), &other).unwrap();
    let text = format!("# of release 7\n{}  l.mar\n", sha256(&archive()));
    fs_err::write(&list, text).unwrap();
    let server = server
        .config("allowed_sha256=digests")
        .config("require_sha256=true")
        .start();
    register(&server, "l.mar", "").expect(200);
    refused(&server, "other.mar", &["`allowed_sha256`", &sha256(&other)]);
    let bad = crate::server();
    fs_err::write(bad.folder().join("digests"), "\nnot one\n").unwrap();
    let (_, output) = bad.config("allowed_sha256=digests").start_and_fail();
    assert!(output.contains("line 2 of `digests`"), "{output}");
}

struct Signer {
    folder: tempfile::TempDir,
    key: PrivateKey,
}

impl Signer {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (private, public) = (folder.path().join("k"), folder.path().join("k.pub"));
        let key = PrivateKey::create(&private, &public).unwrap();
        Self { folder, key }
    }

    fn public(&self) -> PathBuf {
        self.folder.path().join("k.pub")
    }

    fn sign(&self, path: &Path) {
        let signed = signed(path, &UnpackLimits::default()).unwrap();
        self.key.sign(path, signed).unwrap();
    }

    fn trusting(&self, server: Server) -> Server {
        server.config(&format!("trusted_keys={}", self.public().display()))
    }

    fn required(&self, server: Server) -> Server {
        self.trusting(server).config("require_signature=true")
    }
}

#[test]
fn an_archive_or_folder_needs_the_signature_of_somebody_trusted() {
    let (ours, theirs) = (Signer::new(), Signer::new());
    let server = ours.required(with_archive(server().echo_model("folder", "minWorkers: 1")));
    let (archive, folder) = (server.store().join("l.mar"), server.store().join("folder"));
    ours.sign(&archive);
    let server = server.args(&["--models", "n=l.mar", "folder"]).start();
    told(&server, "Failed to load model: folder");
    server.describe("n");
    let (ours_id, theirs_id) = (ours.key.id().to_string(), theirs.key.id().to_string());
    refused(
        &server,
        "folder",
        &["`folder`", "has no signature", &ours_id],
    );
    theirs.sign(&folder);
    refused(&server, "folder", &["not trusted", &theirs_id, &ours_id]);
    ours.sign(&folder);
    register(&server, "folder", "").expect(200);
    server.manage("DELETE", "/models/folder").send().expect(200);
    assert!(folder.is_dir(), "the operator's folder stays");
    let config = folder.join("model-config.yaml");
    fs_err::write(&config, "minWorkers: 2").unwrap();
    refused(&server, "folder", &["changed since", &ours_id]);
    ours.sign(&folder);
    fs_err::write(folder.join("more.py"), "").unwrap();
    refused(&server, "folder", &["changed since"]);

    server.manage("DELETE", "/models/n").send().expect(200);
    let mut bytes = fs_err::read(&archive).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs_err::write(&archive, bytes).unwrap();
    refused(&server, "l.mar", &["`l.mar`", "changed since", &ours_id]);
    fs_err::write(signature_path(&archive), "{}").unwrap();
    refused(
        &server,
        "l.mar",
        &["not one that `torch-model-archiver sign` makes"],
    );
}

#[test]
fn what_is_served_is_what_was_checked() {
    let ours = Signer::new();
    let server = ours.required(server().echo_model("folder", "minWorkers: 1\nbatchSize: 3"));
    let folder = server.store().join("folder");
    ours.sign(&folder);
    let server = server.start();
    register(&server, "folder", "").expect(200);
    // The folder is not the model's any more: a worker that starts now finds what was signed.
    fs_err::remove_dir_all(&folder).unwrap();
    let scale = server.manage("PUT", "/models/folder?min_worker=2&synchronous=true");
    scale.send().expect(200);
    assert_eq!(server.describe("folder")["batchSize"], 3);
}

#[test]
fn a_signature_is_fetched_from_beside_its_archive() {
    let ours = Signer::new();
    let archive = archive();
    let local = ours.folder.path().join("m.mar");
    fs_err::write(&local, &archive).unwrap();
    ours.sign(&local);
    let signature = fs_err::read(signature_path(&local)).unwrap();
    let origin = Origin::start(move |asked, stream, _| match asked.target.as_str() {
        "/m.mar?a=1" | "/unsigned.mar" => write_answer(stream, "200 OK", &[], &archive),
        "/m.mar.sig?a=1" => write_answer(stream, "200 OK", &[], &signature),
        "/huge.mar.sig" => write_answer(stream, "200 OK", &[], &[b'x'; 100_000]),
        _ => write_answer(stream, "404 Not Found", &[], b""),
    });
    let required = ours.required(server()).start();
    for url in ["/unsigned.mar", "/huge.mar"] {
        let answer = register(&required, &origin.url(url), "").expect(400);
        assert!(message(&answer).contains(".mar.sig"), "{answer:?}");
        nothing_is_left(&required);
    }
    register(&required, &origin.url("/m.mar?a=1"), "").expect(200);
    assert_eq!(
        names(&required.folder().join("store")),
        ["m.mar", "m.mar.sig"]
    );
    required.manage("DELETE", "/models/m").send().expect(200);
    nothing_is_left(&required);

    let trusting = ours.trusting(server()).start();
    register(&trusting, &origin.url("/unsigned.mar"), "").expect(200);
    told(&trusting, "the archive has no signature");
}

#[test]
fn a_restored_model_is_checked_as_a_new_one() {
    let ours = Signer::new();
    let server = ours.required(with_archive(server().snapshots()));
    let archive = server.store().join("l.mar");
    ours.sign(&archive);
    let server = server.start();
    register(&server, "l.mar", "").expect(200);
    let server = server.stop_in_order().start();
    server.describe("m");
    let server = server.stop_in_order();
    fs_err::remove_file(signature_path(&archive)).unwrap();
    let server = server.start();
    told(&server, "has no signature");
    assert!(server.worker_pids("m").is_empty());
}

#[test]
fn nobody_is_trusted_by_accident() {
    let (_, output) = server().config("require_signature=true").start_and_fail();
    assert!(output.contains("`trusted_keys` names no key"), "{output}");
    let (_, output) = server()
        .config("trusted_keys=config.properties")
        .start_and_fail();
    assert!(output.contains("holds no public key"), "{output}");
}

/// `posix.mkdir` in the oldest protocol, which no magic number gives away.
const PICKLE: &[u8] = b"cposix\nmkdir\np0\n(Vcanary\np1\ntp2\nRp3\n.";

#[test]
fn a_strict_server_takes_no_pickle_whatever_it_is_called() {
    let server = server()
        .config("load_policy=strict")
        .echo_model("m", "minWorkers: 1")
        .echo_model("loose", "loadPolicy: any");
    for model in ["m", "loose"] {
        fs_err::write(server.store().join(model).join("words.txt"), PICKLE).unwrap();
    }
    let server = server.start();
    for model in ["m", "loose"] {
        let words = [
            "member `words.txt` of",
            &format!("`{model}`"),
            "is a pickle",
            "load_policy=strict",
            "safetensors",
        ];
        refused(&server, model, &words);
    }
    fs_err::write(server.folder().join("store/m/words.txt"), "cat\ndog\n").unwrap();
    register(&server, "m", "").expect(200);
    // Refused at a start, too, and the server goes on.
    assert!(!server.folder().join("canary").exists());
}

#[test]
fn a_model_may_ask_for_less_than_the_server_allows() {
    let server = server()
        .echo_model("strict", "loadPolicy: strict")
        .echo_model("odd", "loadPolicy: stritc")
        .echo_model("any", "");
    for model in ["strict", "odd", "any"] {
        fs_err::write(server.store().join(model).join("w.bin"), PICKLE).unwrap();
    }
    let server = server.start();
    for model in ["strict", "odd"] {
        refused(&server, model, &["`w.bin`", "is a pickle"]);
    }
    register(&server, "any", "").expect(200);
}
