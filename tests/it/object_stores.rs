//! Archives in object stores: S3 against a server that checks signatures, the others against a
//! stand-in that checks what is asked for.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;
use tempfile::TempDir;
use ts_test::{Asked, Origin, Running, Server, write_answer};

use crate::server;
use crate::sources::{archive, names, nothing_is_left, register, sha256, told};

const KEY_ID: &str = "AKIDEXAMPLE";
const SECRET: &str = "wJalrXUtnFEMI-not-to-be-told";

/// An S3 server with a bucket `models`.
struct S3 {
    address: SocketAddr,
    _folder: TempDir,
    _stop: tokio::sync::oneshot::Sender<()>,
}

impl S3 {
    /// Starts it with an object `a/m.mar`.
    fn start(archive: &[u8]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let bucket = folder.path().join("models/a");
        fs_err::create_dir_all(&bucket).unwrap();
        fs_err::write(bucket.join("m.mar"), archive).unwrap();
        let files = FileSystem::new(folder.path()).unwrap();
        let mut service = S3ServiceBuilder::new(files);
        service.set_auth(SimpleAuth::from_single(KEY_ID, SECRET));
        let service = service.build();
        let (told, address) = mpsc::channel();
        let (stop, mut stopped) = tokio::sync::oneshot::channel::<()>();
        let serve = async move {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            told.send(listener.local_addr().unwrap()).unwrap();
            loop {
                let (socket, _) = tokio::select! {
                    accepted = listener.accept() => accepted.unwrap(),
                    _ = &mut stopped => break,
                };
                let service = service.clone();
                tokio::spawn(async move {
                    let http = auto::Builder::new(TokioExecutor::new());
                    // A client that has gone is the test's to judge.
                    let _ended = http.serve_connection(TokioIo::new(socket), service).await;
                });
            }
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let thread = std::thread::Builder::new().name("s3".to_owned());
        thread.spawn(move || runtime.block_on(serve)).unwrap();
        Self {
            address: address.recv().unwrap(),
            _folder: folder,
            _stop: stop,
        }
    }
}

/// A server that has the credentials, and may fetch from everywhere.
fn with_credentials(endpoint: SocketAddr) -> Server {
    server()
        .config("allowed_urls=.*://.*")
        .env("AWS_ACCESS_KEY_ID", KEY_ID)
        .env("AWS_SECRET_ACCESS_KEY", SECRET)
        .env("AWS_DEFAULT_REGION", "eu-west-1")
        .env("AWS_ENDPOINT_URL", &format!("http://{endpoint}"))
        .env("AWS_ALLOW_HTTP", "true")
}

fn stored(server: &Running) -> PathBuf {
    server.folder().join("store/m.mar")
}

#[test]
fn an_archive_comes_from_s3_with_the_credentials_of_the_environment() {
    let archive = archive();
    let s3 = S3::start(&archive);
    let server = with_credentials(s3.address).start();
    let digest = sha256(&archive);
    let more = format!("&initial_workers=1&sha256={digest}");
    register(&server, "s3://models/a/m.mar", &more).expect(200);
    assert_eq!(fs_err::read(stored(&server)).unwrap(), archive);
    assert_eq!(server.describe("m")["modelUrl"], "s3://models/a/m.mar");
    let again = register(&server, "s3://models/a/m.mar", "").expect(500);
    assert!(again.text().contains("Model file already exists m.mar"));
    server.manage("DELETE", "/models/m").send().expect(200);
    let other = format!("&sha256={}", "0".repeat(64));
    let error = register(&server, "s3://models/a/m.mar", &other).expect(400);
    assert!(error.text().contains(&digest), "{}", error.text());
    for (url, words) in [
        ("s3://models/a/none.mar", "no such object"),
        ("s3://none/m.mar", "no such object"),
        ("s3://models/a/m.mar?versionId=1", "query"),
        ("s3://models", "file name"),
    ] {
        let error = register(&server, url, "").expect(400);
        assert!(error.text().contains(words), "{url}: {}", error.text());
    }
    nothing_is_left(&server);
    let log = told(&server, "download ended");
    assert!(!log.contains(SECRET), "{log}");
}

#[test]
fn wrong_credentials_are_told_and_never_shown() {
    let s3 = S3::start(&archive());
    let wrong = "wrong-secret-not-to-be-told";
    let server = with_credentials(s3.address)
        .env("AWS_SECRET_ACCESS_KEY", wrong)
        .config("log_filter=debug")
        .start();
    let error = register(&server, "s3://models/a/m.mar", "")
        .expect(400)
        .text();
    assert!(
        error.contains("refuses the server's credentials"),
        "{error}"
    );
    let log = server.output();
    assert!(
        !error.contains(wrong) && !log.contains(wrong),
        "{error}\n{log}"
    );
    nothing_is_left(&server);
}

#[test]
fn the_scheme_has_to_be_allowed_and_the_store_to_be_set_up() {
    let listener = Origin::serving(Vec::new());
    let server = server()
        .env("AWS_ENDPOINT_URL", &listener.url(""))
        .env("AWS_ALLOW_HTTP", "true")
        .start();
    for url in [
        "s3://models/m.mar",
        "gs://models/m.mar",
        "az://models/m.mar",
    ] {
        let error = register(&server, url, "").expect(404);
        let text = format!("Given URL {url} does not match any allowed URL(s)");
        assert_eq!(error.json()["message"], text.as_str());
    }
    assert_eq!(listener.asked().len(), 0);
    drop(server);
    let server = crate::server().config("allowed_urls=az://.*").start();
    let error = register(&server, "az://models/m.mar", "")
        .expect(400)
        .text();
    assert!(error.to_lowercase().contains("account"), "{error}");
}

/// Passes connections on to an address, and breaks the first ones off after so many bytes of the
/// answer.
fn breaking(to: SocketAddr, breaks: usize, after: usize) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    let pass = move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let limit = if counted.fetch_add(1, Ordering::SeqCst) < breaks {
                after
            } else {
                usize::MAX
            };
            relay(stream, to, limit);
        }
    };
    std::thread::Builder::new()
        .name("breaking".to_owned())
        .spawn(pass)
        .unwrap();
    (address, connections)
}

fn relay(mut client: TcpStream, to: SocketAddr, limit: usize) {
    let mut origin = TcpStream::connect(to).unwrap();
    let (mut from, mut into) = (client.try_clone().unwrap(), origin.try_clone().unwrap());
    let forward = move || std::io::copy(&mut from, &mut into);
    std::thread::Builder::new()
        .name("relay".to_owned())
        .spawn(forward)
        .unwrap();
    let back = move || {
        let mut left = limit;
        let mut buffer = [0; 4096];
        while left > 0 {
            let want = left.min(buffer.len());
            match origin.read(&mut buffer[..want]) {
                Ok(bytes) if bytes > 0 && client.write_all(&buffer[..bytes]).is_ok() => {
                    left -= bytes;
                }
                _ => break,
            }
        }
        let _may_be_gone = client.shutdown(std::net::Shutdown::Both);
        let _may_be_gone = origin.shutdown(std::net::Shutdown::Both);
    };
    std::thread::Builder::new()
        .name("relay-back".to_owned())
        .spawn(back)
        .unwrap();
}

#[test]
fn a_broken_download_from_s3_goes_on() {
    let archive = archive();
    let s3 = S3::start(&archive);
    let (address, connections) = breaking(s3.address, 2, archive.len() / 3);
    let server = with_credentials(address).start();
    let more = format!("&sha256={}", sha256(&archive));
    register(&server, "s3://models/a/m.mar", &more).expect(200);
    assert_eq!(connections.load(Ordering::SeqCst), 3);
    told(&server, "download broken off, going on");
}

#[test]
fn s3_sse_kms_signs_what_an_http_url_names() {
    let archive = archive();
    let s3 = S3::start(&archive);
    let elsewhere = Origin::serving(Vec::new());
    // The address is the URL's, not that of the environment.
    let server = with_credentials(elsewhere.address()).start();
    let url = format!("http://{}/models/a/m.mar", s3.address);
    let error = register(&server, &url, "").expect(400).text();
    assert!(error.contains("403"), "unsigned: {error}");
    register(&server, &url, "&s3_sse_kms=true").expect(200);
    assert_eq!(fs_err::read(stored(&server)).unwrap(), archive);
    server.manage("DELETE", "/models/m").send().expect(200);
    assert_eq!(elsewhere.asked().len(), 0);

    // What is signed for one address is not sent to another.
    let target = elsewhere.url("/models/a/m.mar");
    let moved = Origin::start(move |_, stream, _| {
        write_answer(
            stream,
            "307 Temporary Redirect",
            &[("location", &target)],
            b"",
        )
    });
    register(&server, &moved.url("/models/a/m.mar"), "&s3_sse_kms=true").expect(400);
    let asked = moved.asked();
    let signature = asked[0].header("authorization").unwrap();
    assert!(
        signature.starts_with("AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/"),
        "{signature}"
    );
    assert!(
        signature.contains("/eu-west-1/s3/aws4_request"),
        "{signature}"
    );
    assert_eq!(elsewhere.asked().len(), 0);
    let guarded = "http://169.254.169.254/models/m.mar";
    let listed = with_credentials(s3.address)
        .config("allowed_urls=http://.*")
        .start();
    register(&listed, guarded, "&s3_sse_kms=true").expect(404);
    nothing_is_left(&server);
    let without = crate::server().start();
    let error = register(&without, &url, "&s3_sse_kms=true")
        .expect(400)
        .text();
    assert!(error.contains("AWS_ACCESS_KEY_ID"), "{error}");
}

/// A stand-in for a store: answers requests for one path that carry the right authorization.
fn stand_in(archive: Vec<u8>, path: &'static str, authorization: &'static str) -> Origin {
    Origin::start(move |asked: &Asked, stream, _| {
        let known = asked
            .header("authorization")
            .is_some_and(|a| a.starts_with(authorization));
        let headers = [
            ("etag", "\"1\""),
            ("last-modified", "Mon, 30 Nov 2020 17:00:00 GMT"),
        ];
        if !known {
            write_answer(stream, "403 Forbidden", &[], b"")
        } else if asked.target == path {
            write_answer(stream, "200 OK", &headers, &archive)
        } else {
            write_answer(stream, "404 Not Found", &[], b"")
        }
    })
}

#[test]
fn an_archive_comes_from_google_cloud_storage() {
    let archive = archive();
    let origin = stand_in(archive.clone(), "/models/a%2Fm%2Emar", "Bearer the-token");
    let set_up = |token: &str| {
        server()
            .config("allowed_urls=gs://models/.*")
            .env("GOOGLE_BASE_URL", &origin.url(""))
            .env("GOOGLE_ALLOW_HTTP", "true")
            .env("GOOGLE_BEARER_TOKEN", token)
            .start()
    };
    let server = set_up("the-token");
    register(&server, "gs://models/a/m.mar", "").expect(200);
    assert_eq!(fs_err::read(stored(&server)).unwrap(), archive);
    let error = register(&server, "gs://models/none.mar", "")
        .expect(400)
        .text();
    assert!(error.contains("no such object"), "{error}");
    register(&server, "gs://others/m.mar", "").expect(404);
    let refused = set_up("another-token");
    let error = register(&refused, "gs://models/a/m.mar", "")
        .expect(400)
        .text();
    assert!(
        error.contains("refuses the server's credentials"),
        "{error}"
    );
    assert!(!refused.output().contains("another-token"));
}

#[test]
fn an_archive_comes_from_azure() {
    let archive = archive();
    let origin = stand_in(
        archive.clone(),
        "/devstoreaccount1/models/a/m.mar",
        "SharedKey devstore",
    );
    let server = server()
        .config("allowed_urls=az://.*,abfss?://.*")
        .env("AZURE_STORAGE_USE_EMULATOR", "true")
        .env("AZURITE_BLOB_STORAGE_URL", &origin.url(""))
        .start();
    for scheme in ["az", "abfs", "abfss"] {
        register(&server, &format!("{scheme}://models/a/m.mar"), "").expect(200);
        assert_eq!(fs_err::read(stored(&server)).unwrap(), archive);
        server.manage("DELETE", "/models/m").send().expect(200);
    }
    let error = register(&server, "az://models/none.mar", "")
        .expect(400)
        .text();
    assert!(error.contains("no such object"), "{error}");
    register(
        &server,
        "abfss://models@account.dfs.core.windows.net/m.mar",
        "",
    )
    .expect(404);
    assert_eq!(names(&server.folder().join("store")), [""; 0]);
}
