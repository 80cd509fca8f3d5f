//! Published faults of other archivers, each kept from coming back.

use std::os::unix::fs::symlink;

use fs_err as fs;

use crate::sandbox::{HANDLER, MANIFEST, Sandbox, manifest, names};

#[test]
fn ar_01_extra_files_of_the_same_name_stop_the_packing() {
    let sandbox = Sandbox::new();
    sandbox.write("cfg/config.json", "1");
    sandbox.write("cfg/pool/config.json", "2");
    let error = sandbox.refused(&["--extra-files", "cfg/config.json,cfg/pool/config.json"]);
    assert!(
        error.contains("`cfg/config.json`") && error.contains("`cfg/pool/config.json`"),
        "{error}"
    );
    let members = sandbox.packed(&["--extra-files", "cfg"]);
    assert_eq!(members["config.json"], b"1");
    assert_eq!(members["pool/config.json"], b"2");
}

#[test]
fn ar_01_the_other_flags_collide_too() {
    let sandbox = Sandbox::new();
    sandbox.write("other/h.py", "x = 1");
    sandbox.write("other/model.pt", "other weights");
    let error = sandbox.refused(&["--extra-files", "other/h.py"]);
    assert!(
        error.contains("`other/h.py`") && error.contains("`h.py`"),
        "{error}"
    );
    let error = sandbox.refused(&[
        "--serialized-file",
        "model.pt",
        "--extra-files",
        "other/model.pt",
    ]);
    assert!(error.contains("`other/model.pt`"), "{error}");
    // The same file by two flags is one file.
    let members = sandbox.packed(&[
        "--serialized-file",
        "model.pt",
        "--extra-files",
        "./model.pt,h.py",
    ]);
    assert_eq!(names(&members), [MANIFEST, "h.py", "model.pt"]);
}

#[test]
fn ar_02_folders_go_to_the_top_or_keep_their_name() {
    let sandbox = Sandbox::new();
    sandbox.write("lib1/mod.py", "a = 1");
    sandbox.write("lib1/sub/deep/x.py", "x = 1");
    sandbox.write("lib2/mod.py", "b = 1");
    let error = sandbox.refused(&["--extra-files", "lib1,lib2"]);
    assert!(
        error.contains("`lib1/mod.py`") && error.contains("`lib2/mod.py`"),
        "{error}"
    );
    let members = sandbox.packed(&["--extra-files", "lib1,lib2/", "--keep-dirs"]);
    assert_eq!(
        names(&members),
        [
            MANIFEST,
            "h.py",
            "lib1/mod.py",
            "lib1/sub/deep/x.py",
            "lib2/mod.py"
        ]
    );
    let members = sandbox.packed(&["--extra-files", "lib1", "-f"]);
    assert_eq!(
        names(&members),
        [MANIFEST, "h.py", "mod.py", "sub/deep/x.py"]
    );
}

#[test]
fn ar_02_what_tools_leave_behind_is_passed_over() {
    let sandbox = Sandbox::new();
    for name in [
        "lib/a.py",
        "lib/.git/config",
        "lib/sub/__pycache__/a.pyc",
        "lib/__MACOSX/x",
        "lib/.env",
        "lib/sub/b.py",
    ] {
        sandbox.write(name, "x");
    }
    let members = sandbox.packed(&["--extra-files", "lib"]);
    assert_eq!(
        names(&members),
        [".env", MANIFEST, "a.py", "h.py", "sub/b.py"]
    );
}

#[test]
fn ar_03_patterns_expand_and_literal_names_win() {
    let sandbox = Sandbox::new();
    for name in ["t1.txt", "t2.txt", "t7.txt", "w[1].bin", "w1.bin"] {
        sandbox.write(name, name);
    }
    let extra = |list: &str| {
        let members = sandbox.packed(&["--extra-files", list, "-f"]);
        let names = members.into_keys();
        names
            .filter(|name| name.starts_with(['t', 'w']))
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert_eq!(extra("t?.txt"), "t1.txt t2.txt t7.txt");
    assert_eq!(extra("t[0-3].txt"), "t1.txt t2.txt");
    assert_eq!(extra("*.txt, w1.bin"), "t1.txt t2.txt t7.txt w1.bin");
    assert_eq!(extra("w[1].bin"), "w[1].bin");
    assert_eq!(extra("t1.txt,,t2.txt,"), "t1.txt t2.txt");
    fs::remove_file(sandbox.path("out/m.mar")).unwrap();
    let error = sandbox.refused(&["--extra-files", "t1.txt,z*.txt"]);
    assert!(error.contains("`z*.txt` matches no file"), "{error}");
    let error = sandbox.refused(&["--extra-files", "t[.txt"]);
    assert!(error.contains("`t[.txt`"), "{error}");
}

#[test]
fn ar_04_the_export_folder_is_made_and_a_file_in_its_place_is_an_early_error() {
    let sandbox = Sandbox::new();
    let args = [
        "--model-name",
        "m",
        "-v",
        "1",
        "--handler",
        "h.py",
        "--export-path",
    ];
    let ran = sandbox.run(&[&args[..], &["new/deep/dir"]].concat());
    ran.succeeded();
    assert_eq!(ran.stderr, "note: created folder `new/deep/dir`\n");
    assert_eq!(sandbox.listing("new/deep/dir"), ["m.mar"]);
    let ran = sandbox.run(&[&args[..], &["model.pt"]].concat());
    assert_eq!(ran.code, 1);
    assert!(
        ran.stderr.contains("`model.pt` is a file"),
        "{}",
        ran.stderr
    );
    // A mistake elsewhere makes no folder.
    let ran = sandbox.run(&[&args[..], &["other/dir", "--extra-files", "gone"]].concat());
    assert_eq!(ran.code, 1);
    assert_eq!(sandbox.listing("."), ["h.py", "model.pt", "new"]);
}

#[test]
fn ar_05_every_format_verifies_as_loadable() {
    let sandbox = Sandbox::new();
    for (format, output) in [
        ("default", "out/m.mar"),
        ("zip-store", "out/m.mar"),
        ("tgz", "out/m.tar.gz"),
        ("no-archive", "out/m"),
    ] {
        sandbox
            .pack(&["--archive-format", format, "--force"])
            .succeeded();
        let ran = sandbox.run(&["verify", output]);
        assert_eq!(
            (ran.code, ran.stderr.as_str()),
            (0, ""),
            "{format}: {}",
            ran.stdout
        );
    }
}

#[test]
fn ar_06_the_manifest_holds_base_names_only() {
    let sandbox = Sandbox::empty();
    sandbox.write("sub/dir/model.py", "class Net: pass");
    sandbox.write("sub/dir/handler.py", HANDLER);
    sandbox
        .pack(&[
            "--archive-format",
            "no-archive",
            "--model-file",
            "sub/dir/model.py",
            "--handler",
            "sub/dir/handler",
        ])
        .succeeded();
    assert_eq!(
        sandbox.listing("out/m"),
        ["MAR-INF", "handler.py", "model.py"]
    );
    let text = fs::read_to_string(sandbox.path("out/m").join(MANIFEST)).unwrap();
    assert!(
        text.contains(r#""modelFile": "model.py""#) && text.contains(r#""handler": "handler.py""#)
    );
    let here = sandbox.path(".");
    assert!(
        !text.contains("sub/dir") && !text.contains(here.to_str().unwrap()),
        "{text}"
    );
}

#[test]
fn ar_08_a_requirement_called_like_the_servers_package_is_refused() {
    let sandbox = Sandbox::new();
    sandbox.write("req.txt", "torchserve-extras\nts==0.5\n");
    let error = sandbox.refused(&["-r", "req.txt"]);
    assert!(
        error.contains("line 2") && error.contains("`ts`"),
        "{error}"
    );
}

#[test]
fn ar_12_every_documented_spelling_of_a_handler_is_accepted() {
    let sandbox = Sandbox::new();
    sandbox.write(
        "dir/h2.py",
        "def handle(data, context): pass\ndef entry(d, c): pass\n",
    );
    sandbox.write("pkg/__init__.py", "");
    sandbox.write("pkg/mod/__init__.py", "");
    sandbox.write("pkg/mod/handler.py", HANDLER);
    let package = ["--extra-files", "pkg", "--keep-dirs"];
    for (spelling, written, file, more) in [
        ("h.py", "h.py", "h.py", &[][..]),
        ("h", "h.py", "h.py", &[]),
        ("h.py:MyHandler", "h:MyHandler", "h.py", &[]),
        ("h.py:handle", "h:handle", "h.py", &[]),
        ("dir/h2", "h2.py", "h2.py", &[]),
        ("dir/h2.py", "h2.py", "h2.py", &[]),
        ("dir/h2:handle", "h2:handle", "h2.py", &[]),
        ("dir/h2:entry", "h2:entry", "h2.py", &[]),
        (
            "pkg.mod.handler",
            "pkg.mod.handler",
            "pkg/mod/handler.py",
            &package,
        ),
        (
            "pkg.mod.handler.MyHandler",
            "pkg.mod.handler.MyHandler",
            "pkg/mod/handler.py",
            &package,
        ),
        (
            "pkg.mod.handler:MyHandler",
            "pkg.mod.handler:MyHandler",
            "pkg/mod/handler.py",
            &package,
        ),
    ] {
        let members = sandbox.packed(&[&["--handler", spelling, "-f"][..], more].concat());
        assert_eq!(manifest(&members)["model"]["handler"], written);
        assert!(members.contains_key(file), "{spelling}");
        let verified = sandbox.run(&["verify", "out/m.mar"]);
        assert_eq!(verified.code, 0, "{spelling}: {}", verified.stdout);
    }
    fs::remove_file(sandbox.path("out/m.mar")).unwrap();
    let error = sandbox.refused(&["--handler", "pkg.mod.handler"]);
    assert!(error.contains("--keep-dirs"), "{error}");
    let error = sandbox.refused(&["--handler", "h.py:no such"]);
    assert!(error.contains("`no such`"), "{error}");
}

#[test]
fn ar_12_a_handler_that_is_absent_or_ambiguous_is_told_when_packing() {
    let sandbox = Sandbox::new();
    let error = sandbox.refused(&["--handler", "h.py:Missing"]);
    assert!(
        error.contains("`Missing`") && error.contains("`MyHandler`"),
        "{error}"
    );
    sandbox.write("two.py", "class Helper: pass\nclass TheHandler: pass\n");
    let error = sandbox.refused(&["--handler", "two.py"]);
    assert!(
        error.contains("`Helper`, `TheHandler`") && error.contains("`two:<class>`"),
        "{error}"
    );
    sandbox.write("none.py", "import os\n# class Comment:\n");
    let error = sandbox.refused(&["--handler", "none.py"]);
    assert!(
        error.contains("neither a function `handle` nor a class"),
        "{error}"
    );
    sandbox.packed(&["--handler", "two.py:TheHandler"]);
    sandbox.write(
        "imports.py",
        format!("from ts.x import BaseHandler, Other\n{HANDLER}"),
    );
    sandbox.packed(&["--handler", "imports.py", "-f"]);
}

#[test]
fn ar_14_files_named_like_well_known_modules_are_packed_unchanged() {
    let sandbox = Sandbox::new();
    for name in ["service.py", "utils.py", "json.py", "ts.py"] {
        sandbox.write(name, HANDLER);
        let members = sandbox.packed(&["--handler", name, "-f"]);
        assert_eq!(manifest(&members)["model"]["handler"], name);
    }
}

#[test]
fn cf_15_entries_are_written_with_forward_slashes_and_odd_inputs_are_told() {
    let sandbox = Sandbox::new();
    sandbox.write("lib/Sub Dir/Ünï.py", "x");
    sandbox.write("lib/CON", "x");
    let error = sandbox.refused(&["--extra-files", "lib"]);
    assert!(
        error.contains("`lib/CON`") && error.contains("device"),
        "{error}"
    );
    fs::remove_file(sandbox.path("lib/CON")).unwrap();
    assert_eq!(
        names(&sandbox.packed(&["--extra-files", "lib"])),
        [MANIFEST, "Sub Dir/Ünï.py", "h.py"]
    );
}

#[test]
fn extra_links_are_packed_as_the_files_they_lead_to() {
    let sandbox = Sandbox::new();
    sandbox.write("real/data.txt", "content");
    fs::create_dir(sandbox.path("lib")).unwrap();
    symlink("../real/data.txt", sandbox.path("lib/link.txt")).unwrap();
    assert_eq!(
        sandbox.packed(&["--extra-files", "lib"])["link.txt"],
        b"content"
    );
    symlink("nowhere", sandbox.path("lib/broken")).unwrap();
    fs::remove_file(sandbox.path("out/m.mar")).unwrap();
    let error = sandbox.refused(&["--extra-files", "lib"]);
    assert!(
        error.contains("`lib`") && error.contains("broken"),
        "{error}"
    );
}
