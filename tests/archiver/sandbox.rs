//! A folder of one's own and the program in it.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use fs_err as fs;

pub(crate) const MANIFEST: &str = "MAR-INF/MANIFEST.json";

/// A handler that every check accepts.
pub(crate) const HANDLER: &str = "class MyHandler:\n    def handle(self, data, context): pass\n";

/// A fresh folder that goes with the test.
pub(crate) struct Sandbox {
    folder: tempfile::TempDir,
}

/// What the program did.
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Sandbox {
    /// An empty folder.
    pub(crate) fn empty() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    /// A folder with a handler `h.py` and weights `model.pt`.
    pub(crate) fn new() -> Self {
        let sandbox = Self::empty();
        sandbox.write("h.py", HANDLER);
        sandbox.write("model.pt", "weights");
        sandbox
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// Everything in the folder, hidden or not.
    pub(crate) fn listing(&self, folder: &str) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(self.path(folder))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_torch-model-archiver"));
        command
            .current_dir(self.folder.path())
            .env_remove("SOURCE_DATE_EPOCH")
            .stdin(Stdio::null());
        command
    }

    /// Runs the program with exactly these arguments.
    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        Ran::from(self.command().args(args).output().unwrap())
    }

    /// Packs model `m`, version 1.0, with handler `h.py` and more arguments, into `out`.
    pub(crate) fn pack(&self, more: &[&str]) -> Ran {
        let mut args = vec![
            "--model-name",
            "m",
            "--version",
            "1.0",
            "--export-path",
            "out",
        ];
        if !more.contains(&"--handler") {
            args.extend(["--handler", "h.py"]);
        }
        args.extend(more);
        fs::create_dir_all(self.path("out")).unwrap();
        self.run(&args)
    }

    /// Packs as [`Sandbox::pack`], which must succeed, and gives the members of `out/m.mar`.
    pub(crate) fn packed(&self, more: &[&str]) -> BTreeMap<String, Vec<u8>> {
        self.pack(more).succeeded();
        zip_members(&self.path("out/m.mar"))
    }

    /// Packs as [`Sandbox::pack`], which must fail with exit code 1 and leave nothing behind.
    pub(crate) fn refused(&self, more: &[&str]) -> String {
        let ran = self.pack(more);
        assert_eq!((ran.code, ran.stdout.as_str()), (1, ""), "{}", ran.stderr);
        assert_eq!(self.listing("out"), Vec::<String>::new());
        ran.stderr
    }
}

impl Ran {
    /// Asserts success without a word on stdout.
    pub(crate) fn succeeded(&self) -> &Self {
        assert_eq!(
            (self.code, self.stdout.as_str()),
            (0, ""),
            "{}",
            self.stderr
        );
        self
    }
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().expect("the program was not killed"),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// The files of a zip archive.
pub(crate) fn zip_members(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut zip = zip::ZipArchive::new(fs::File::open(path).unwrap()).unwrap();
    (0..zip.len())
        .map(|index| {
            let mut member = zip.by_index(index).unwrap();
            let mut content = Vec::new();
            member.read_to_end(&mut content).unwrap();
            (member.name().unwrap().into_owned(), content)
        })
        .collect()
}

/// The files of a `.tar.gz` archive.
pub(crate) fn tar_members(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(fs::File::open(path).unwrap()));
    tar.entries()
        .unwrap()
        .map(|entry| {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().to_str().unwrap().to_owned();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            (name, content)
        })
        .collect()
}

/// The names of members.
pub(crate) fn names(members: &BTreeMap<String, Vec<u8>>) -> Vec<&str> {
    members.keys().map(String::as_str).collect()
}

/// The manifest among members.
pub(crate) fn manifest(members: &BTreeMap<String, Vec<u8>>) -> serde_json::Value {
    serde_json::from_slice(&members[MANIFEST]).unwrap()
}
