//! Every flag, default, message and exit code that scripts rely on.

use fs_err as fs;

use crate::sandbox::{HANDLER, MANIFEST, Sandbox, manifest, names, tar_members, zip_members};

#[test]
fn a_plain_run_writes_a_deflated_mar_and_says_nothing() {
    let sandbox = Sandbox::new();
    let ran = sandbox.run(&[
        "--model-name",
        "resnet-18",
        "-v",
        "2.0",
        "--handler",
        "h.py",
        "--serialized-file",
        "model.pt",
    ]);
    ran.succeeded();
    assert_eq!(ran.stderr, "");
    let members = zip_members(&sandbox.path("resnet-18.mar"));
    assert_eq!(names(&members), [MANIFEST, "h.py", "model.pt"]);
    let manifest = manifest(&members);
    assert_eq!(manifest["runtime"], "python");
    assert_eq!(manifest["model"]["modelName"], "resnet-18");
    assert_eq!(manifest["model"]["modelVersion"], "2.0");
    assert_eq!(manifest["model"]["handler"], "h.py");
    assert_eq!(manifest["model"]["serializedFile"], "model.pt");
    assert!(manifest["model"].get("modelFile").is_none());
    assert!(manifest["archiverVersion"].is_string());
    let created = manifest["createdOn"].as_str().unwrap();
    let shape: String = created
        .chars()
        .map(|c| if c.is_ascii_digit() { '0' } else { c })
        .collect();
    assert_eq!(shape, "00/00/0000 00:00:00");
}

#[test]
fn every_file_flag_lands_at_the_top_and_in_the_manifest() {
    let sandbox = Sandbox::new();
    sandbox.write("a/net.py", "class Net: pass");
    sandbox.write("a/weights.pth", "w");
    sandbox.write("a/requirements.txt", "numpy\n");
    sandbox.write("a/model-config.yaml", "batchSize: 4\n");
    sandbox.write("a/index_to_name.json", "{}");
    let members = sandbox.packed(&[
        "--serialized-file",
        "a/weights.pth",
        "--model-file",
        "a/net.py",
        "-r",
        "a/requirements.txt",
        "-c",
        "a/model-config.yaml",
        "--extra-files",
        "a/index_to_name.json",
        "--runtime",
        "python3",
    ]);
    assert_eq!(
        names(&members),
        [
            MANIFEST,
            "h.py",
            "index_to_name.json",
            "model-config.yaml",
            "net.py",
            "requirements.txt",
            "weights.pth",
        ]
    );
    let manifest = manifest(&members);
    assert_eq!(manifest["runtime"], "python3");
    assert_eq!(
        manifest["model"],
        serde_json::json!({
            "modelName": "m", "modelVersion": "1.0", "serializedFile": "weights.pth",
            "modelFile": "net.py", "handler": "h.py", "requirementsFile": "requirements.txt",
            "configFile": "model-config.yaml",
        })
    );
}

#[test]
fn the_four_formats_hold_the_same_files() {
    let sandbox = Sandbox::new();
    sandbox.write("data/deep/x.txt", "x".repeat(5000));
    let more = [
        "--extra-files",
        "data",
        "--serialized-file",
        "model.pt",
        "--archive-format",
    ];
    let pack = |format| {
        sandbox
            .pack(&[&more[..], &[format, "--force"]].concat())
            .succeeded()
            .code
    };
    pack("default");
    let deflated = zip_members(&sandbox.path("out/m.mar"));
    let deflated_size = fs::metadata(sandbox.path("out/m.mar")).unwrap().len();
    pack("zip-store");
    let stored = zip_members(&sandbox.path("out/m.mar"));
    assert!(deflated_size < 3000 && fs::metadata(sandbox.path("out/m.mar")).unwrap().len() > 5000);
    pack("tgz");
    let tar = tar_members(&sandbox.path("out/m.tar.gz"));
    pack("no-archive");
    assert_eq!(
        names(&deflated),
        [MANIFEST, "deep/x.txt", "h.py", "model.pt"]
    );
    assert_eq!(deflated, stored);
    let top: Vec<_> = deflated
        .iter()
        .map(|(name, bytes)| (format!("m/{name}"), bytes.clone()))
        .collect();
    assert_eq!(tar.into_iter().collect::<Vec<_>>(), top);
    for (name, content) in &deflated {
        assert_eq!(
            &fs::read(sandbox.path("out/m").join(name)).unwrap(),
            content,
            "{name}"
        );
    }
    assert_eq!(sandbox.listing("out"), ["m", "m.mar", "m.tar.gz"]);
}

#[test]
fn an_existing_output_is_kept_unless_forced() {
    let sandbox = Sandbox::new();
    for (format, output) in [
        ("default", "m.mar"),
        ("zip-store", "m.mar"),
        ("tgz", "m.tar.gz"),
        ("no-archive", "m"),
    ] {
        let _ = fs::remove_file(sandbox.path("out/m.mar"));
        sandbox.pack(&["--archive-format", format]).succeeded();
        let again = sandbox.pack(&["--archive-format", format]);
        assert_eq!((again.code, again.stdout.as_str()), (1, ""));
        assert!(
            again
                .stderr
                .contains(&format!("out/{output} already exists.\n")),
            "{}",
            again.stderr
        );
        assert!(again.stderr.contains("--force"), "{}", again.stderr);
        sandbox.write("h.py", format!("{HANDLER}# {format}\n"));
        sandbox
            .pack(&["--archive-format", format, "-f"])
            .succeeded();
    }
    assert_eq!(sandbox.listing("out"), ["m", "m.tar.gz"]);
    assert!(
        fs::read_to_string(sandbox.path("out/m/h.py"))
            .unwrap()
            .contains("# no-archive")
    );
}

#[test]
fn force_never_deletes_a_folder_that_is_not_a_model() {
    let sandbox = Sandbox::new();
    sandbox.write("out/m/precious.py", "x");
    let ran = sandbox.pack(&["--archive-format", "no-archive", "--force"]);
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("`out/m`"), "{}", ran.stderr);
    assert_eq!(sandbox.listing("out/m"), ["precious.py"]);
}

#[test]
fn usage_mistakes_exit_with_2() {
    let sandbox = Sandbox::new();
    let all = ["--model-name", "m", "--version", "1", "--handler", "h.py"];
    for missing in [0, 2, 4] {
        let mut args = all.to_vec();
        let flag = args.remove(missing);
        args.remove(missing);
        let ran = sandbox.run(&args);
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""));
        assert!(ran.stderr.contains(flag), "{}", ran.stderr);
    }
    for wrong in [
        &["--runtime", "python2"][..],
        &["--runtime", "echo"],
        &["--archive-format", "rar"],
        &["--no-such-flag"],
        &["stray"],
        &["--model-file"],
    ] {
        let ran = sandbox.run(&[&all, wrong].concat());
        assert_eq!(ran.code, 2, "{wrong:?}: {}", ran.stderr);
    }
    assert_eq!(sandbox.run(&[]).code, 2);
    assert_eq!(sandbox.run(&["verify"]).code, 2);
    assert_eq!(sandbox.listing("."), ["h.py", "model.pt"]);
}

#[test]
fn prefixes_equal_signs_and_repeats_work_as_in_argparse() {
    let sandbox = Sandbox::new();
    sandbox
        .run(&[
            "--model-n=first",
            "--model-name=m",
            "--vers=1",
            "--hand",
            "h.py",
            "--serial",
            "model.pt",
        ])
        .succeeded();
    assert_eq!(
        names(&zip_members(&sandbox.path("m.mar"))),
        [MANIFEST, "h.py", "model.pt"]
    );
    let ambiguous = sandbox.run(&["--model", "m", "--version", "1", "--handler", "h.py"]);
    assert_eq!(ambiguous.code, 2);
}

#[test]
fn help_goes_to_stdout() {
    let ran = Sandbox::empty().run(&["--help"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    for flag in [
        "--model-name",
        "--version",
        "--handler",
        "--serialized-file",
        "--model-file",
        "--extra-files",
        "--keep-dirs",
        "--export-path",
        "--runtime",
        "--archive-format",
        "--force",
        "--requirements-file",
        "--config-file",
        "inspect",
        "verify",
    ] {
        assert!(ran.stdout.contains(flag), "{flag} is not in the help");
    }
}

#[test]
fn files_that_do_not_exist_are_named() {
    let sandbox = Sandbox::new();
    for flag in [
        "--serialized-file",
        "--model-file",
        "--extra-files",
        "-r",
        "-c",
        "--requirements-file",
        "--config-file",
    ] {
        let error = sandbox.refused(&[flag, "gone.x"]);
        assert!(
            error.contains("`gone.x`") && error.contains("does not exist"),
            "{error}"
        );
    }
    let error = sandbox.refused(&["--handler", "gone"]);
    assert!(error.contains("`gone.py` does not exist"), "{error}");
    sandbox.write("folder/x", "");
    let error = sandbox.refused(&["--serialized-file", "folder"]);
    assert!(error.contains("`folder` is a folder"), "{error}");
}

#[test]
fn a_model_file_is_optional_and_weights_only_where_nothing_runs_without() {
    let sandbox = Sandbox::new();
    let error = sandbox.refused(&["--handler", "image_classifier"]);
    assert!(error.contains("--serialized-file"), "{error}");
    let members = sandbox.packed(&[
        "--handler",
        "image_classifier",
        "--serialized-file",
        "model.pt",
    ]);
    assert_eq!(manifest(&members)["model"]["handler"], "image_classifier");
    assert_eq!(names(&members), [MANIFEST, "model.pt"]);
    for handler in [
        "base_handler",
        "dali_image_classifier",
        "vllm_handler",
        "trt_llm_handler",
    ] {
        let members = sandbox.packed(&["--handler", handler, "-f"]);
        assert_eq!(manifest(&members)["model"]["handler"], handler);
    }
}

#[test]
fn the_native_runtime_has_handlers_of_its_own() {
    let sandbox = Sandbox::new();
    for handler in ["BaseHandler", "TorchScriptHandler"] {
        let members = sandbox.packed(&["--runtime", "LSP", "--handler", handler, "-f"]);
        assert_eq!(manifest(&members)["runtime"], "LSP");
        assert_eq!(manifest(&members)["model"]["handler"], handler);
    }
    sandbox.write("lib/libmine.so", "elf");
    let members = sandbox.packed(&["--runtime", "LSP", "--handler", "lib/libmine.so", "-f"]);
    assert_eq!(manifest(&members)["model"]["handler"], "libmine.so");
    assert!(members.contains_key("libmine.so"));
    fs::remove_file(sandbox.path("out/m.mar")).unwrap();
    sandbox.refused(&["--runtime", "LSP", "--handler", "image_classifier"]);
}

#[test]
fn odd_model_names_and_versions_are_refused_by_rule() {
    let sandbox = Sandbox::new();
    for name in [
        "m;touch canary",
        "$(touch canary)",
        "`touch canary`",
        "a\nb",
        "a'b",
        "a\"b",
        "a b",
        "../m",
        "a/b",
        ".m",
        "_m",
        "",
        "模型",
    ] {
        let args = [
            "--version",
            "1",
            "--handler",
            "h.py",
            &format!("--model-name={name}"),
        ];
        let ran = sandbox.run(&args);
        assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "{name:?}");
        assert!(ran.stderr.contains("^[A-Za-z0-9]"), "{}", ran.stderr);
    }
    for version in ["", "a/b", "../1", "1\n2"] {
        let args = [
            "--model-name",
            "m",
            "--handler",
            "h.py",
            &format!("--version={version}"),
        ];
        let ran = sandbox.run(&args);
        assert_eq!(ran.code, 1, "{version:?}");
        assert!(ran.stderr.contains("--version"), "{}", ran.stderr);
    }
    assert_eq!(sandbox.listing("."), ["h.py", "model.pt"]);
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let sandbox = Sandbox::new();
    sandbox.write("data/b.txt", "b");
    sandbox.write("data/a.txt", "a");
    for format in ["default", "zip-store", "tgz"] {
        let name = if format == "tgz" {
            "out/m.tar.gz"
        } else {
            "out/m.mar"
        };
        let bytes = || {
            sandbox
                .pack(&["--archive-format", format, "--extra-files", "data", "-f"])
                .succeeded();
            fs::read(sandbox.path(name)).unwrap()
        };
        assert!(bytes() == bytes(), "{format}");
    }
    let args = ["--model-name", "m", "-v", "1", "--handler", "h.py", "-f"];
    let dated = |epoch: &str| {
        let output = sandbox
            .command()
            .args(args)
            .env("SOURCE_DATE_EPOCH", epoch)
            .output()
            .unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    assert_eq!(dated("86399"), (Some(0), String::new()));
    let created = manifest(&zip_members(&sandbox.path("m.mar")))["createdOn"].clone();
    assert_eq!(created, "01/01/1970 23:59:59");
    let (code, error) = dated("yesterday");
    assert!(code == Some(1) && error.contains("`yesterday`"), "{error}");
}

#[test]
fn configuration_and_requirements_are_judged_when_packing() {
    let sandbox = Sandbox::new();
    sandbox.write("bad.yaml", "a: 1\na: 2\n");
    let error = sandbox.refused(&["-c", "bad.yaml"]);
    assert!(error.contains("`bad.yaml` line 2"), "{error}");
    sandbox.write(
        "tags.yaml",
        "a: !!python/object/apply:os.system ['touch canary']\n",
    );
    sandbox.refused(&["-c", "tags.yaml"]);
    sandbox.write(
        "req.txt",
        "numpy\n--index-url http://example.invalid\n-e .\nts\n",
    );
    let error = sandbox.refused(&["-r", "req.txt"]);
    for line in ["line 2", "line 3", "line 4"] {
        assert!(error.contains(line), "{error}");
    }
    sandbox.write("odd.yaml", "batchSize: '4'\n");
    let ran = sandbox.pack(&["-c", "odd.yaml"]);
    ran.succeeded();
    assert!(
        ran.stderr.starts_with("warning: `odd.yaml`: `batchSize`"),
        "{}",
        ran.stderr
    );
}

#[test]
fn a_read_only_export_folder_is_an_error_that_names_it() {
    let sandbox = Sandbox::new();
    let ran = sandbox.run(&[
        "--model-name",
        "m",
        "-v",
        "1",
        "--handler",
        "h.py",
        "--export-path",
        "/proc",
    ]);
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("`/proc`"), "{}", ran.stderr);
}
