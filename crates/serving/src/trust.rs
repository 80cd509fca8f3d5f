//! Whether an archive may be taken, and its unpacking: digest, list of digests, signature, and what
//! its files are. What is checked is a private copy, and the copy is what is unpacked.

use std::path::Path;

use ts_archive::{
    ArchiveError, Artifact, Digest, Pinned, SignatureFault, Signed, read_signature, refuse_pickles,
    unpack,
};
use ts_types::LoadPolicy;

use crate::config::{ServingConfig, Trust};
use crate::error::ServingError;
use crate::spec;

impl Trust {
    /// Whether there is anything to check of every archive.
    fn asks(&self) -> bool {
        self.allowed.is_some() || self.require_signature || !self.keys.is_empty()
    }

    /// Fails where a registration has to say a digest and says none. A list of all digests does as
    /// well.
    ///
    /// # Errors
    /// It has to.
    pub(crate) fn check_given(
        &self,
        url: &str,
        expected: Option<Digest>,
    ) -> Result<(), ServingError> {
        if self.require_sha256 && expected.is_none() && self.allowed.is_none() {
            return Err(ServingError::BadRegistration(format!(
                "`{url}` is refused: `require_sha256` is on, and the registration does not say the \
                 archive's sha256. Add the parameter `sha256`, or `#sha256=` and the digest after the \
                 url"
            )));
        }
        Ok(())
    }

    fn check_digest(
        &self,
        url: &str,
        signed: Signed,
        expected: Option<Digest>,
    ) -> Result<(), ServingError> {
        if expected.is_none() && self.allowed.is_none() {
            return Ok(());
        }
        let Signed::Archive(found) = signed else {
            return Err(ServingError::BadRegistration(format!(
                "`{url}` is a folder, which has no sha256: only archives have. Register it without \
                 one, or pack it"
            )));
        };
        if let Some(expected) = expected.filter(|expected| *expected != found) {
            return Err(ServingError::DigestMismatch {
                url: url.to_owned(),
                expected: expected.to_string(),
                found: found.to_string(),
            });
        }
        match &self.allowed {
            Some(allowed) if !allowed.contains(&found) => {
                Err(ServingError::BadRegistration(format!(
                    "the archive at `{url}` has the sha256 {found}, which is not in the list that \
                     `allowed_sha256` names"
                )))
            }
            _ => Ok(()),
        }
    }

    fn check_signature(&self, path: &Path, signed: Signed) -> Result<(), ServingError> {
        if self.keys.is_empty() {
            return Ok(());
        }
        let signature = read_signature(path)?;
        match self.keys.check(signed, signature.as_deref()) {
            Ok(key) => {
                tracing::info!(archive = %path.display(), %key, "the signature is good");
                Ok(())
            }
            Err(SignatureFault::Missing) if !self.require_signature => {
                tracing::warn!(archive = %path.display(), "the archive has no signature");
                Ok(())
            }
            Err(fault) => Err(ServingError::Archive(ArchiveError::NotTrusted {
                archive: path.to_owned(),
                fault,
                trusted: self.keys.ids(),
            })),
        }
    }
}

/// Unpacks an archive that may be taken. Blocks.
///
/// # Errors
/// It may not, or cannot be unpacked; nothing of it is left then.
pub(crate) fn unpack_trusted(
    config: &ServingConfig,
    url: &str,
    path: &Path,
    expected: Option<Digest>,
) -> Result<Artifact, ServingError> {
    let (trust, work, limits) = (&config.trust, &config.work_dir, &config.unpack_limits);
    let artifact = if expected.is_some() || trust.asks() {
        let pinned = Pinned::copy(path, work, limits)?;
        trust.check_digest(url, pinned.signed(), expected)?;
        trust.check_signature(path, pinned.signed())?;
        pinned.unpack(work, limits)?
    } else {
        unpack(path, work, limits)?
    };
    if spec::load_policy(config, &artifact) == LoadPolicy::Strict {
        refuse_pickles(&artifact.dir, path)?;
    }
    Ok(artifact)
}
