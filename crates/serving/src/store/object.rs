//! Archives in object stores, through their own client: with the credentials that the server's
//! environment has, as each store's tools read them.

use std::error::Error as _;

use futures_util::{StreamExt as _, TryStreamExt as _};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::{HttpClient, HttpConnector, HttpError, HttpErrorKind};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::path::Path;
use object_store::{
    ClientConfigKey, ClientOptions, GetOptions, GetRange, ObjectStore, RetryConfig,
};
use regex::RegexSet;
use reqwest::Url;
use reqwest::redirect::Policy;
use ts_types::with_causes;

use super::download::{Bounds, CONNECT_LIMIT, Failure, IDLE_LIMIT, Opened, Remote, Resume};
use super::http;

/// The schemes of stores that are known here.
pub(super) const SCHEMES: [&str; 5] = ["s3", "gs", "az", "abfs", "abfss"];

/// Characters of the store's words that are told.
const TOLD_CHARS: usize = 300;

/// An object of a store.
pub(super) struct Object {
    store: Box<dyn ObjectStore>,
    path: Path,
}

impl Object {
    /// The object of an `s3://`, `gs://` or `az://` URL.
    ///
    /// # Errors
    /// A URL that names no object, or settings of the store that are missing or wrong.
    pub(super) fn named(url: &Url, bounds: Bounds) -> Result<Self, Failure> {
        http::prepare_tls();
        let bucket = url.host_str().unwrap_or_default();
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if bucket.is_empty() || !bucket.bytes().all(is_name) || url.port().is_some() {
            return Err(Failure::lasting(
                "it has no valid name of a bucket or container",
            ));
        }
        let path = path(url)?;
        let options = client_options(bounds);
        let store: Result<Box<dyn ObjectStore>, _> = match url.scheme() {
            "s3" => {
                let builder = AmazonS3Builder::from_env()
                    .with_bucket_name(bucket)
                    .with_retry(no_retries());
                let built = options.into_iter().fold(builder, |builder, (key, value)| {
                    builder.with_config(AmazonS3ConfigKey::Client(key), value)
                });
                built.build().map(|store| Box::new(store) as _)
            }
            "gs" => {
                let builder = GoogleCloudStorageBuilder::from_env()
                    .with_bucket_name(bucket)
                    .with_retry(no_retries());
                let built = options.into_iter().fold(builder, |builder, (key, value)| {
                    builder.with_config(GoogleConfigKey::Client(key), value)
                });
                built.build().map(|store| Box::new(store) as _)
            }
            _ => {
                let builder = MicrosoftAzureBuilder::from_env()
                    .with_container_name(bucket)
                    .with_retry(no_retries());
                let built = options.into_iter().fold(builder, |builder, (key, value)| {
                    builder.with_config(AzureConfigKey::Client(key), value)
                });
                built.build().map(|store| Box::new(store) as _)
            }
        };
        Ok(Self {
            store: store.map_err(|error| Failure::lasting(told(&error)))?,
            path,
        })
    }

    /// The file of an HTTP URL, asked for with the signature that S3 wants (`s3_sse_kms`).
    ///
    /// # Errors
    /// A URL that names no object, or credentials that are missing.
    pub(super) fn signed(allowed: &RegexSet, url: &Url) -> Result<Self, Failure> {
        let path = path(url)?;
        let environment = AmazonS3Builder::from_env();
        let is_set = |key| environment.get_config_value(&key).is_some();
        if !is_set(AmazonS3ConfigKey::AccessKeyId) || !is_set(AmazonS3ConfigKey::SecretAccessKey) {
            // Those of the machine's role are for stores that the operator has listed.
            return Err(Failure::lasting(
                "`s3_sse_kms` needs `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` in the \
                 server's environment",
            ));
        }
        // What is signed holds for one address.
        let client = http::guarded(allowed).redirect(Policy::none()).build();
        let client = client.map_err(|error| Failure::lasting(with_causes(&error)))?;
        let endpoint = url.origin().ascii_serialization();
        // The whole path is taken for the object's, as in a bucket with a host of its own: the URL
        // that is fetched is then the one given, wherever the bucket stands in it.
        let store = environment
            .with_bucket_name(url.host_str().unwrap_or_default())
            .with_config(AmazonS3ConfigKey::S3Endpoint, endpoint)
            .with_virtual_hosted_style_request(true)
            .with_config(AmazonS3ConfigKey::S3Express, "false")
            .with_skip_signature(false)
            .with_http_connector(Connector(client))
            .with_retry(no_retries())
            .build();
        Ok(Self {
            store: Box::new(store.map_err(|error| Failure::lasting(told(&error)))?),
            path,
        })
    }
}

impl Remote for Object {
    async fn open(&self, resume: Option<&Resume>) -> Result<Opened, Failure> {
        let options = |resume: Option<&Resume>| GetOptions {
            range: resume.map(|resume| GetRange::Offset(resume.from)),
            if_match: resume.map(|resume| resume.version.clone()),
            ..GetOptions::default()
        };
        let mut got = self.store.get_opts(&self.path, options(resume)).await;
        if matches!(got, Err(object_store::Error::Precondition { .. })) {
            // It is another object by now.
            got = self.store.get_opts(&self.path, options(None)).await;
        }
        let object = got.map_err(|error| failure(&error))?;
        Ok(Opened {
            start: object.range.start,
            total: Some(object.meta.size),
            version: object.meta.e_tag.clone(),
            body: object.into_stream().map_err(|error| told(&error)).boxed(),
        })
    }
}

/// The path of the object in its bucket.
fn path(url: &Url) -> Result<Path, Failure> {
    if url.query().is_some() {
        return Err(Failure::lasting(
            "it has a query, which the address of an object has not: the server signs it itself",
        ));
    }
    Path::from_url_path(url.path()).map_err(|error| Failure::lasting(error.to_string()))
}

fn client_options(bounds: Bounds) -> [(ClientConfigKey, String); 3] {
    let seconds = |limit: std::time::Duration| format!("{}s", limit.as_secs());
    [
        (ClientConfigKey::ConnectTimeout, seconds(CONNECT_LIMIT)),
        (ClientConfigKey::ReadTimeout, seconds(IDLE_LIMIT)),
        // Of a request with its body.
        (ClientConfigKey::Timeout, seconds(bounds.time)),
    ]
}

/// Downloads are tried again by the one rule that holds for all sources.
fn no_retries() -> RetryConfig {
    RetryConfig {
        max_retries: 0,
        ..RetryConfig::default()
    }
}

/// Hands out one client, whatever it is for.
#[derive(Debug)]
struct Connector(reqwest::Client);

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.0.clone()))
    }
}

fn failure(error: &object_store::Error) -> Failure {
    use object_store::Error;
    Failure {
        reason: told(error),
        passing: matches!(error, Error::Generic { .. }),
    }
}

/// The error in words of our own where there are some: the client's name addresses and repeat what
/// the store answered.
fn told(error: &object_store::Error) -> String {
    use object_store::Error;
    match error {
        Error::NotFound { .. } => "there is no such object".to_owned(),
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
            "the store refuses the server's credentials".to_owned()
        }
        other => {
            let text = http_kind(other).map_or_else(|| other.to_string(), str::to_owned);
            let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
            line.chars().take(TOLD_CHARS).collect()
        }
    }
}

/// What the connection failed with, if it did.
fn http_kind(error: &object_store::Error) -> Option<&'static str> {
    let mut cause = error.source();
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<HttpError>() {
            return Some(match error.kind() {
                HttpErrorKind::Connect => "no connection to the store",
                HttpErrorKind::Timeout => "the store did not answer in time",
                _ => "the connection to the store broke off",
            });
        }
        cause = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds {
        bytes: 1,
        time: std::time::Duration::from_secs(1),
    };

    fn refused(url: &str) -> String {
        let object = Object::named(&Url::parse(url).unwrap(), BOUNDS);
        object
            .err()
            .unwrap_or_else(|| panic!("{url} passed"))
            .reason
    }

    #[test]
    fn addresses_without_a_bucket_or_with_more_than_a_path_are_refused() {
        for url in [
            "s3:///m.mar",
            "s3://a:9/m.mar",
            "s3://b%2Fc/m.mar",
            "az://a%40b/m.mar",
        ] {
            assert!(refused(url).contains("no valid name"), "{url}");
        }
        assert!(refused("s3://b/m.mar?versionId=1").contains("query"));
        assert!(
            refused("s3://b/a//m.mar").contains("empty"),
            "{}",
            refused("s3://b/a//m.mar")
        );
    }
}
