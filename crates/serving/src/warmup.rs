//! Requests that every worker answers before it counts as ready, from samples in the archive: the
//! first calls of a model take many times longer than later ones, and no client should be the one
//! who waits.
//!
//! ```yaml
//! warmup:
//!   - file: sample.jpg           # in the archive
//!     contentType: image/jpeg    # as a client would send it; default application/octet-stream
//!     name: data                 # the field; default body
//! ```

use std::path::Path;

use bytes::Bytes;
use serde::Deserialize;
use ts_archive::{MemberPath, ModelConfig};
use ts_types::{InferRequest, ModelName, Part, RequestId, RequestKind, Urgency};

use crate::error::ServingError;

/// Times each sample is sent: the first two calls of a TorchScript model are slow, the third shows
/// that it has become fast.
const RUNS: usize = 3;

/// Bytes that all samples of a model may have: they stay in memory for workers to come.
const MAX_BYTES: u64 = 64 << 20;

/// Requests of a batch that is only run to see how long it takes. Its bodies have no more bytes
/// than samples may have.
const LARGEST_TRIAL: usize = 1024;

/// The samples of a model.
#[derive(Debug, Default)]
pub(crate) struct WarmUp {
    samples: Vec<Sample>,
}

#[derive(Debug)]
struct Sample {
    file: String,
    part: Part,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Entry {
    file: String,
    #[serde(default = "any_bytes")]
    content_type: String,
    #[serde(default = "body")]
    name: String,
}

fn any_bytes() -> String {
    "application/octet-stream".to_owned()
}

fn body() -> String {
    "body".to_owned()
}

impl Sample {
    fn request(&self, model: &ModelName) -> InferRequest {
        let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        InferRequest {
            id: RequestId::random(),
            model: model.clone(),
            version: None,
            kind: RequestKind::Predict,
            parts: vec![self.part.clone()],
            headers: vec![header("url_path", ""), header("explain", "False")],
            urgency: Urgency::default(),
        }
    }
}

impl WarmUp {
    /// Reads the samples that the model's configuration names.
    ///
    /// # Errors
    /// A configuration of another form, a file that is not in the archive, too many bytes.
    pub(crate) fn read(config: &ModelConfig, folder: &Path) -> Result<Self, ServingError> {
        let bad = |reason: String| {
            ServingError::BadRegistration(format!(
                "`warmup` in the model's configuration: {reason}"
            ))
        };
        let Some(value) = config.other.get("warmup") else {
            return Ok(Self::default());
        };
        let entries: Vec<Entry> =
            serde_json::from_value(value.clone()).map_err(|error| bad(error.to_string()))?;
        let mut samples = Vec::with_capacity(entries.len());
        let mut left = MAX_BYTES;
        for Entry {
            file,
            content_type,
            name,
        } in entries
        {
            let member =
                MemberPath::parse(&file).map_err(|fault| bad(format!("`{file}`: {fault}")))?;
            let path = folder.join(member.as_str());
            let bytes = fs_err::metadata(&path)
                .map_err(|_| bad(format!("`{file}` is not in the archive")))?
                .len();
            left = left
                .checked_sub(bytes)
                .ok_or_else(|| bad(format!("the samples have over {MAX_BYTES} bytes")))?;
            let value = fs_err::read(&path).map_err(|error| bad(error.to_string()))?;
            let part = Part {
                name,
                content_type,
                value: Bytes::from(value),
            };
            samples.push(Sample { file, part });
        }
        Ok(Self { samples })
    }

    /// The requests to send, each with the name of its sample.
    pub(crate) fn requests<'a>(
        &'a self,
        model: &'a ModelName,
    ) -> impl Iterator<Item = (&'a str, InferRequest)> {
        self.samples.iter().flat_map(move |sample| {
            (0..RUNS).map(move |_| (sample.file.as_str(), sample.request(model)))
        })
    }

    /// Sizes of batches whose times tell what a batch costs, smallest first: each as often as a
    /// sample is sent. None where there is no sample, or nothing to learn.
    pub(crate) fn batch_sizes(&self, batch_size: usize) -> impl Iterator<Item = usize> {
        let bytes = self.samples.first().map(|sample| sample.part.value.len());
        // None of a sample too large to be sent twice.
        let most = bytes.map_or(0, |bytes| {
            let fit = MAX_BYTES / (bytes as u64).max(1);
            let fit = usize::try_from(fit).unwrap_or(usize::MAX);
            batch_size.min(LARGEST_TRIAL).min(fit)
        });
        let mut sizes = vec![1, 2, most];
        sizes.dedup();
        sizes.retain(|size| most > 1 && *size <= most);
        sizes
            .into_iter()
            .flat_map(|size| std::iter::repeat_n(size, RUNS))
    }

    /// A batch of one sample.
    pub(crate) fn batch(&self, model: &ModelName, size: usize) -> Vec<InferRequest> {
        let samples = self.samples.iter().take(1).cycle().take(size);
        samples.map(|sample| sample.request(model)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(yaml: &str) -> Result<WarmUp, ServingError> {
        let folder = tempfile::tempdir().unwrap();
        fs_err::write(folder.path().join("a.txt"), "abc").unwrap();
        let config = ModelConfig::parse(yaml, Path::new("model-config.yaml")).unwrap();
        WarmUp::read(&config, folder.path())
    }

    #[test]
    fn each_sample_is_sent_three_times() {
        let model = ModelName::new("m").unwrap();
        let yaml = "warmup:\n  - file: a.txt\n    contentType: text/plain\n    name: data\n";
        let warm_up = read(yaml).unwrap();
        let requests: Vec<_> = warm_up.requests(&model).collect();
        assert_eq!(requests.len(), RUNS);
        let part = &requests[2].1.parts[0];
        assert_eq!(
            (part.name.as_str(), part.content_type.as_str()),
            ("data", "text/plain")
        );
        assert_eq!(&part.value[..], b"abc");
        assert_eq!(read("minWorkers: 1\n").unwrap().requests(&model).count(), 0);
        let sizes = |batch_size| warm_up.batch_sizes(batch_size).collect::<Vec<_>>();
        assert!(sizes(1).is_empty());
        assert_eq!(sizes(2), [1, 1, 1, 2, 2, 2]);
        assert_eq!(sizes(8), [1, 1, 1, 2, 2, 2, 8, 8, 8]);
        assert_eq!(warm_up.batch(&model, 8).len(), 8);
    }

    #[test]
    fn a_trial_has_a_bound_whatever_the_batch_size_is() {
        let largest = |bytes| {
            let part = Part {
                name: body(),
                content_type: any_bytes(),
                value: Bytes::from(vec![0; bytes]),
            };
            let file = String::new();
            let samples = vec![Sample { file, part }];
            WarmUp { samples }.batch_sizes(1_000_000_000).max()
        };
        assert_eq!(largest(3), Some(LARGEST_TRIAL));
        assert_eq!(largest(16 << 20), Some(4));
        assert_eq!(largest(32 << 20), Some(2));
        assert_eq!(largest(40 << 20), None);
    }

    #[test]
    fn what_is_no_sample_is_told() {
        for (yaml, told) in [
            (
                "warmup:\n  - file: none.txt\n",
                "`none.txt` is not in the archive",
            ),
            ("warmup:\n  - file: ../a.txt\n", "`../a.txt`"),
            ("warmup: a.txt\n", "`warmup`"),
            ("warmup:\n  - file: a.txt\n    type: x\n", "type"),
        ] {
            let error = read(yaml).unwrap_err().to_string();
            assert!(error.contains(told), "{yaml}: {error}");
        }
    }
}
