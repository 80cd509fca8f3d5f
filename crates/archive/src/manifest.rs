//! `MAR-INF/MANIFEST.json`: what the archive holds and what runs it.

use std::path::Path;

use fs_err as fs;
use serde::{Deserialize, Deserializer, Serialize};
use ts_types::Runtime;

use crate::error::{ArchiveError, Doing};
use crate::member::MemberPath;

/// The manifest's path inside an archive.
pub const MANIFEST_PATH: &str = "MAR-INF/MANIFEST.json";

/// More than any real manifest, and little enough to read at once.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;

/// The manifest of a model archive. Keys that are not listed here are ignored when reading.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// When it was packed, `dd/mm/YYYY HH:MM:SS`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created_on: Option<String>,
    /// What runs the model.
    pub runtime: Runtime,
    /// The model itself.
    pub model: ManifestModel,
    /// Version of the tool that packed it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub archiver_version: Option<String>,
}

/// The `model` object of a manifest. File fields are checked paths inside the archive.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ManifestModel {
    /// The name it is registered under unless the registration gives one.
    #[serde(deserialize_with = "text", skip_serializing_if = "Option::is_none")]
    pub model_name: Option<String>,
    /// The version; the server takes `1.0` when there is none.
    #[serde(deserialize_with = "text", skip_serializing_if = "Option::is_none")]
    pub model_version: Option<String>,
    /// Weights or a scripted module.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serialized_file: Option<String>,
    /// Python file with the class of an eager model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_file: Option<String>,
    /// A file, the name of a default handler, or `module:name`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handler: Option<String>,
    /// Requirement list for the model's own packages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requirements_file: Option<String>,
    /// `model-config.yaml`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_file: Option<String>,
    /// Vocabulary of old text models.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_vocab: Option<String>,
    /// Free text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Whatever old archives put there; handlers see it unchanged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extensions: Option<serde_json::Value>,
}

/// What the file holds before it is judged.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Draft {
    #[serde(default, deserialize_with = "text")]
    created_on: Option<String>,
    #[serde(default, deserialize_with = "text")]
    runtime: Option<String>,
    model: Option<ManifestModel>,
    #[serde(default, deserialize_with = "text")]
    archiver_version: Option<String>,
}

/// Hand-written manifests hold `"modelVersion": 2.0`; TorchServe's reader takes it as text.
fn text<'de, D: Deserializer<'de>>(input: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Scalar {
        Text(String),
        Number(serde_json::Number),
    }
    Ok(
        Option::<Scalar>::deserialize(input)?.map(|scalar| match scalar {
            Scalar::Text(text) => text,
            Scalar::Number(number) => number.to_string(),
        }),
    )
}

impl Default for Manifest {
    /// What an archive without a manifest gets: the Python runtime and nothing else.
    fn default() -> Self {
        Self {
            created_on: None,
            runtime: Runtime::Python,
            model: ManifestModel::default(),
            archiver_version: None,
        }
    }
}

impl Manifest {
    /// Reads the manifest of an unpacked model. A folder without one gets the default manifest.
    ///
    /// # Errors
    /// When the file is not a valid manifest; the error names the folder, the field and the remedy.
    pub fn read(model_dir: &Path) -> Result<Self, ArchiveError> {
        Self::read_of(model_dir, model_dir)
    }

    /// As [`Manifest::read`], with `archive` as the name that errors show.
    pub(crate) fn read_of(model_dir: &Path, archive: &Path) -> Result<Self, ArchiveError> {
        use std::io::ErrorKind::{NotADirectory, NotFound};
        let path = model_dir.join(MANIFEST_PATH);
        let metadata = match fs::metadata(&path) {
            Ok(metadata) => metadata,
            Err(error) if matches!(error.kind(), NotFound | NotADirectory) => {
                return Ok(Self::default());
            }
            Err(error) => return Err(error).doing("read", &path),
        };
        let refuse = |reason| {
            Err(ArchiveError::ManifestSyntax {
                archive: archive.to_owned(),
                source: serde::de::Error::custom(reason),
            })
        };
        if !metadata.is_file() {
            return refuse("it is not a file");
        }
        if metadata.len() > MAX_MANIFEST_BYTES {
            return refuse("it is larger than 1 MiB");
        }
        Self::parse(&fs::read(&path).doing("read", &path)?, archive)
    }

    /// Judges the bytes of a manifest; `archive` is the name that errors show.
    ///
    /// # Errors
    /// As [`Manifest::read`].
    pub fn parse(bytes: &[u8], archive: &Path) -> Result<Self, ArchiveError> {
        // Editors of some systems put a byte order mark first, which JSON does not allow.
        let bytes = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes);
        let owned = || archive.to_owned();
        let draft: Draft =
            serde_json::from_slice(bytes).map_err(|source| ArchiveError::ManifestSyntax {
                archive: owned(),
                source,
            })?;
        let Some(mut model) = draft.model else {
            return Err(ArchiveError::ModelEntryMissing { archive: owned() });
        };
        let runtime = match draft.runtime.as_deref().map(str::parse) {
            Some(Ok(runtime)) => runtime,
            _ => {
                return Err(ArchiveError::RuntimeInvalid {
                    archive: owned(),
                    given: draft.runtime,
                });
            }
        };
        if model.model_name.as_deref() == Some("") {
            return Err(ArchiveError::ModelNameUndefined {
                archive: owned(),
                state: "is empty",
            });
        }
        if model.model_version.as_deref() == Some("") {
            return Err(ArchiveError::ModelVersionUndefined { archive: owned() });
        }
        for (field, value) in model.file_fields_mut() {
            if value.as_deref() == Some("") {
                *value = None;
            }
            if let Some(file) = value {
                *file = MemberPath::parse(file)
                    .map_err(|fault| ArchiveError::ManifestPath {
                        archive: owned(),
                        field,
                        fault,
                    })?
                    .as_str()
                    .to_owned();
            }
        }
        if model.handler.as_deref() == Some("") {
            model.handler = None;
        }
        Ok(Self {
            created_on: draft.created_on,
            runtime,
            model,
            archiver_version: draft.archiver_version,
        })
    }

    /// The model's name, for a registration that gives none; `archive` is the name that the error
    /// shows.
    ///
    /// # Errors
    /// When the manifest has no name.
    pub fn model_name(&self, archive: &Path) -> Result<&str, ArchiveError> {
        self.model
            .model_name
            .as_deref()
            .ok_or_else(|| ArchiveError::ModelNameUndefined {
                archive: archive.to_owned(),
                state: "is missing",
            })
    }

    /// The file as it is written: indented JSON with a final newline.
    pub fn to_json(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec_pretty(self)
            .expect("a manifest holds texts and JSON values, which all can be written");
        bytes.push(b'\n');
        bytes
    }
}

impl ManifestModel {
    /// The fields that name a file in the archive, by their name in the manifest. `handler` is not
    /// among them: it may be a module or a name of the server's own.
    pub fn file_fields(&self) -> [(&'static str, Option<&str>); 5] {
        [
            ("serializedFile", self.serialized_file.as_deref()),
            ("modelFile", self.model_file.as_deref()),
            ("requirementsFile", self.requirements_file.as_deref()),
            ("configFile", self.config_file.as_deref()),
            ("sourceVocab", self.source_vocab.as_deref()),
        ]
    }

    fn file_fields_mut(&mut self) -> [(&'static str, &mut Option<String>); 5] {
        [
            ("serializedFile", &mut self.serialized_file),
            ("modelFile", &mut self.model_file),
            ("requirementsFile", &mut self.requirements_file),
            ("configFile", &mut self.config_file),
            ("sourceVocab", &mut self.source_vocab),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Manifest, ArchiveError> {
        Manifest::parse(text.as_bytes(), Path::new("/store/x.mar"))
    }

    fn message(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    #[test]
    fn a_full_manifest_survives_writing_and_reading() {
        let manifest = parse(
            r#"{"createdOn":"01/02/2024 03:04:05","runtime":"python3","archiverVersion":"0.12.0",
                "license":"none","model":{"modelName":"m","modelVersion":"2.0","handler":"h.py",
                "serializedFile":"m.pt","extensions":{"a":[1]},"envelope":"json"}}"#,
        )
        .unwrap();
        assert_eq!(manifest.runtime, Runtime::Python3);
        assert_eq!(manifest.model.model_version.as_deref(), Some("2.0"));
        assert_eq!(
            parse(&String::from_utf8(manifest.to_json()).unwrap()).unwrap(),
            manifest
        );
    }

    #[test]
    fn each_fault_begins_with_the_known_sentence_and_names_archive_and_field() {
        for (text, sentence, field) in [
            (
                r#"{"runtime":"python"}"#,
                "Missing Model entry in manifest file.",
                "`model`",
            ),
            (
                r#"{"runtime":"python","model":{"modelName":""}}"#,
                "Model name is not defined.",
                "`model.modelName`",
            ),
            (
                r#"{"runtime":"python","model":{"modelVersion":""}}"#,
                "Model version is not defined.",
                "`model.modelVersion`",
            ),
            (
                r#"{"model":{}}"#,
                "Runtime is not defined or invalid.",
                "`runtime`",
            ),
            (
                r#"{"runtime":"perl","model":{}}"#,
                "Runtime is not defined or invalid.",
                "is `perl`; known are",
            ),
            ("{oops", "Failed to parse signature.json.", "line 1"),
            (
                r#"{"runtime":"python","model":"m"}"#,
                "Failed to parse signature.json.",
                "line 1",
            ),
        ] {
            let message = message(text);
            assert!(message.starts_with(sentence), "{message}");
            assert!(
                message.contains("`x.mar`") && message.contains(field),
                "{message}"
            );
            assert!(!message.contains("/store"), "{message}");
        }
    }

    #[test]
    fn a_missing_name_is_asked_for_only_when_needed() {
        let manifest = parse(r#"{"runtime":"python","model":{}}"#).unwrap();
        let error = manifest
            .model_name(Path::new("x.mar"))
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("Model name is not defined. ") && error.contains("model_name="));
    }

    #[test]
    fn file_fields_cannot_leave_the_archive() {
        for bad in ["../x", "/etc/passwd", "..\\\\x", "C:\\\\x"] {
            let text = format!(r#"{{"runtime":"python","model":{{"configFile":"{bad}"}}}}"#);
            assert!(message(&text).contains("model.configFile"), "{bad}");
        }
        let kept = parse(r#"{"runtime":"python","model":{"configFile":"sub\\c.yaml"}}"#).unwrap();
        assert_eq!(kept.model.config_file.as_deref(), Some("sub/c.yaml"));
    }

    #[test]
    fn byte_order_mark_crlf_and_number_versions_are_understood() {
        let text = "\u{feff}{\r\n\"runtime\":\"echo\",\r\n\"model\":{\"modelVersion\":1.5}}\r\n";
        let manifest = parse(text).unwrap();
        assert_eq!(manifest.runtime, Runtime::Echo);
        assert_eq!(manifest.model.model_version.as_deref(), Some("1.5"));
    }

    #[test]
    fn no_manifest_is_the_default_manifest() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Manifest::read(folder.path()).unwrap(), Manifest::default());
        fs::write(folder.path().join("MAR-INF"), "a file").unwrap();
        assert_eq!(Manifest::read(folder.path()).unwrap(), Manifest::default());
    }

    #[test]
    fn a_folder_in_the_place_of_the_manifest_is_the_archives_fault() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join(MANIFEST_PATH)).unwrap();
        let error = Manifest::read(folder.path()).unwrap_err();
        assert!(matches!(error, ArchiveError::ManifestSyntax { .. }));
        assert!(error.to_string().ends_with("it is not a file"), "{error}");
    }
}
