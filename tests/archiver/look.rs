//! `inspect` and `verify`, on good archives and on those made to harm.

use std::io::{Cursor, Write};

use serde_json::Value;
use zip::write::SimpleFileOptions;

use crate::sandbox::{HANDLER, MANIFEST, Sandbox};

fn zip(members: &[(&str, &str)]) -> Vec<u8> {
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, content) in members {
        zip.start_file(*name, SimpleFileOptions::default()).unwrap();
        zip.write_all(content.as_bytes()).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

fn tar_gz(name: &str) -> Vec<u8> {
    let encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    let mut tar = tar::Builder::new(encoder);
    let mut header = tar::Header::new_gnu();
    header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
    header.set_size(1);
    header.set_mode(0o644);
    header.set_cksum();
    tar.append(&header, &b"x"[..]).unwrap();
    tar.into_inner().unwrap().finish().unwrap()
}

#[test]
fn inspect_shows_manifest_sizes_and_checksums() {
    let sandbox = Sandbox::new();
    sandbox.write("zeros.bin", vec![0; 100_000]);
    for (format, output, top, kind) in [
        ("default", "out/m.mar", "", "zip"),
        ("tgz", "out/m.tar.gz", "m/", "tar"),
        ("no-archive", "out/m", "", "folder"),
    ] {
        sandbox
            .pack(&["--archive-format", format, "--extra-files", "zeros.bin"])
            .succeeded();
        let ran = sandbox.run(&["inspect", output, "--json"]);
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
        let found: Value = serde_json::from_str(&ran.stdout).unwrap();
        assert_eq!(found["format"], kind);
        assert_eq!(found["manifest"]["model"]["modelName"], "m");
        let members = found["members"].as_array().unwrap();
        assert_eq!(members.len(), 3);
        let zeros = members
            .iter()
            .find(|m| m["path"] == format!("{top}zeros.bin"))
            .unwrap();
        assert_eq!(zeros["size"], 100_000);
        assert_eq!(
            zeros["sha256"], "9192c25b734fcbadbe32dadc28089c60db0e39f90cc20ce2e5733f57261acc0c",
            "{kind}"
        );
        assert_eq!(
            zeros["compressed_size"]
                .as_u64()
                .is_some_and(|size| size < 1000),
            kind == "zip"
        );
    }
    let ran = sandbox.run(&["inspect", "out/m.mar"]);
    assert!(ran.code == 0 && ran.stdout.contains("zeros.bin") && ran.stdout.contains("100000"));
}

#[test]
fn inspect_of_what_is_not_there_fails() {
    let sandbox = Sandbox::new();
    for command in ["inspect", "verify"] {
        let ran = sandbox.run(&[command, "gone.mar"]);
        assert_eq!((ran.code, ran.stdout.as_str()), (1, ""));
        assert!(
            ran.stderr.contains("`gone.mar` does not exist"),
            "{}",
            ran.stderr
        );
    }
}

#[test]
fn verify_collects_every_reason() {
    let sandbox = Sandbox::empty();
    let manifest = r#"{"runtime":"python","model":{"modelVersion":"1","handler":"h.py:Nope",
        "serializedFile":"model.pt","modelFile":"net.py","requirementsFile":"r.txt",
        "configFile":"c.yaml"}}"#;
    sandbox.write(
        "bad.mar",
        zip(&[
            (MANIFEST, manifest),
            ("h.py", HANDLER),
            ("r.txt", "--index-url x\nts\n"),
            ("c.yaml", "a: [1\n"),
            ("../escape", "x"),
        ]),
    );
    let ran = sandbox.run(&["verify", "bad.mar", "--json"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (1, ""));
    let found: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(found["ok"], false);
    let about: Vec<_> = found["problems"]
        .as_array()
        .unwrap()
        .iter()
        .map(|problem| problem["about"].as_str().unwrap())
        .collect();
    assert_eq!(
        about,
        [
            "archive",
            "model.modelName",
            "model.serializedFile",
            "model.modelFile",
            "model.configFile",
            "model.requirementsFile",
            "model.requirementsFile",
            "model.handler",
        ]
    );
    let plain = sandbox.run(&["verify", "bad.mar"]);
    assert_eq!(
        (plain.code, plain.stdout.lines().count()),
        (1, 8),
        "{}",
        plain.stdout
    );
}

#[test]
fn ar_11_verify_names_archive_field_and_remedy() {
    let sandbox = Sandbox::empty();
    for (manifest, field, remedy) in [
        (
            r#"{"runtime":"python","model":{"handler":"h.py"}}"#,
            "model.modelName",
            "model_name=",
        ),
        (
            r#"{"runtime":"python","model":{"modelName":""}}"#,
            "model.modelName",
            "--model-name",
        ),
        (
            r#"{"runtime":"python","model":{"modelName":"m","modelVersion":""}}"#,
            "model.modelVersion",
            "--version",
        ),
    ] {
        sandbox.write(
            "edited.mar",
            zip(&[(MANIFEST, manifest), ("h.py", HANDLER)]),
        );
        let ran = sandbox.run(&["verify", "edited.mar"]);
        assert_eq!(ran.code, 1);
        for text in ["`edited.mar`", field, remedy] {
            assert!(ran.stdout.contains(text), "{text} is not in {}", ran.stdout);
        }
    }
    let manifest = r#"{"runtime":"python","model":{"modelName":"m","handler":"h.py"}}"#;
    sandbox.write(
        "unversioned.mar",
        zip(&[(MANIFEST, manifest), ("h.py", HANDLER)]),
    );
    assert_eq!(sandbox.run(&["verify", "unversioned.mar"]).code, 0);
}

#[test]
fn se_01_escaping_members_are_named_and_never_written() {
    let sandbox = Sandbox::empty();
    for name in ["../../x", "/tmp/x", "a/../../x", "..\\..\\x", "C:\\x"] {
        sandbox.write("evil.mar", zip(&[(name, "x")]));
        sandbox.write("evil.tar.gz", tar_gz(name));
        for file in ["evil.mar", "evil.tar.gz"] {
            for command in ["verify", "inspect"] {
                let ran = sandbox.run(&[command, file]);
                assert_eq!(ran.code, 1, "{command} {name}");
                let said = ran.stdout + &ran.stderr;
                assert!(said.contains(&format!("member `{name}`")), "{said}");
            }
        }
    }
    assert_eq!(sandbox.listing("."), ["evil.mar", "evil.tar.gz"]);
}

#[test]
fn hl_02_broken_files_are_told_apart() {
    let sandbox = Sandbox::new();
    let good = zip(&[("h.py", HANDLER), ("data", &"0123456789".repeat(500))]);
    for (name, bytes, text) in [
        ("truncated.mar", &good[..good.len() / 2], "is damaged"),
        ("empty.mar", &b""[..], "is empty"),
        (
            "text.mar",
            b"<html>not found</html>",
            "does not begin like one",
        ),
        ("bare.mar", &good, "there is no `MAR-INF/MANIFEST.json`"),
    ] {
        sandbox.write(name, bytes);
        let ran = sandbox.run(&["verify", name]);
        assert_eq!(ran.code, 1, "{name}");
        assert!(ran.stdout.contains(text), "{}", ran.stdout);
    }
}

#[test]
fn se_15_configuration_that_is_more_than_data_is_refused() {
    let sandbox = Sandbox::empty();
    let manifest = r#"{"runtime":"echo","model":{"modelName":"m","configFile":"c.yaml"}}"#;
    let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..10 {
        let items = vec![format!("*a{}", level - 1); 10].join(", ");
        bomb.push_str(&format!("a{level}: &a{level} [{items}]\n"));
    }
    let long = format!("a: {}", "x".repeat(1 << 20));
    for config in ["a: !!python/name:os.system\n", "a: 1\na: 2\n", &bomb, &long] {
        sandbox.write("m.mar", zip(&[(MANIFEST, manifest), ("c.yaml", config)]));
        let ran = sandbox.run(&["verify", "m.mar"]);
        assert_eq!(ran.code, 1);
        assert!(
            ran.stdout
                .contains("model.configFile: model configuration `c.yaml`"),
            "{}",
            ran.stdout
        );
    }
}

#[test]
fn what_was_signed_is_verified_and_what_was_changed_is_not() {
    use std::os::unix::fs::PermissionsExt as _;
    let sandbox = Sandbox::empty();
    let manifest = r#"{"runtime":"echo","model":{"modelName":"m"}}"#;
    let archive = "m.mar";
    sandbox.write(archive, zip(&[(MANIFEST, manifest)]));
    for key in ["ours", "theirs"] {
        let ran = sandbox.run(&["keygen", key]);
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
        assert!(ran.stdout.contains(": key "), "{}", ran.stdout);
    }
    let mode = fs_err::metadata(sandbox.path("ours"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let again = sandbox.run(&["keygen", "ours"]);
    assert_eq!(again.code, 1, "a key is never replaced: {}", again.stdout);

    let verify = |trusted: &str| sandbox.run(&["verify", "--trusted-keys", trusted, archive]);
    let said = |trusted: &str, words: &str| {
        let ran = verify(trusted);
        assert_eq!(ran.code, 1, "{}", ran.stdout);
        assert!(
            ran.stdout.contains(words),
            "{words} is not in {}",
            ran.stdout
        );
    };
    said("ours.pub", "signature: `");
    said("ours.pub", "has no signature");
    let ran = sandbox.run(&["sign", "--key", "ours", archive]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        ran.stdout.contains(&format!("{archive}.sig: signed by ")),
        "{}",
        ran.stdout
    );
    assert_eq!(verify("ours.pub").code, 0);
    assert_eq!(verify("theirs.pub,ours.pub").code, 0);
    said("theirs.pub", "not trusted");
    let json = sandbox.run(&["verify", "--json", "--trusted-keys", "theirs.pub", archive]);
    assert!(
        json.stdout.contains("\"about\":\"signature\""),
        "{}",
        json.stdout
    );
    let mut bytes = fs_err::read(sandbox.path(archive)).unwrap();
    bytes.push(0);
    sandbox.write(archive, bytes);
    said("ours.pub", "changed since");

    let unusable = sandbox.run(&["sign", "--key", "ours.pub", archive]);
    assert_eq!(unusable.code, 1);
    assert!(
        unusable.stderr.contains("holds no private key"),
        "{}",
        unusable.stderr
    );
    let nobody = sandbox.run(&["verify", "--trusted-keys", "ours", archive]);
    assert_eq!(nobody.code, 1);
    assert!(
        nobody.stderr.contains("holds no public key"),
        "{}",
        nobody.stderr
    );
}

#[test]
fn a_strict_server_is_asked_for_ahead() {
    let sandbox = Sandbox::empty();
    let manifest = r#"{"runtime":"echo","model":{"modelName":"m"}}"#;
    let pickle = "cposix\nmkdir\n(Vx\ntR.";
    sandbox.write(
        "m.mar",
        zip(&[(MANIFEST, manifest), ("labels.txt", pickle)]),
    );
    assert_eq!(sandbox.run(&["verify", "m.mar"]).code, 0);
    assert_eq!(
        sandbox
            .run(&["verify", "--load-policy", "weights-only", "m.mar"])
            .code,
        0
    );
    let ran = sandbox.run(&["verify", "--load-policy", "strict", "m.mar"]);
    assert_eq!(ran.code, 1);
    assert!(
        ran.stdout
            .contains("member `labels.txt` of `m.mar` is a pickle"),
        "{}",
        ran.stdout
    );
    assert_eq!(
        sandbox
            .run(&["verify", "--load-policy", "lax", "m.mar"])
            .code,
        2
    );
}
