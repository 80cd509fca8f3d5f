//! TLS (*torchserve-contract* 12) on every listener: where keys come from, what clients see over
//! HTTP/1 and HTTP/2, who may connect, and what comes of those who do not speak it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use ts_test::{Running, Server};

use crate::server;

/// Who vouches for the certificates of a test.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    der: CertificateDer<'static>,
    pem: String,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Issuers are found by their names.
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, "the authority of a test");
        let certificate = params.self_signed(&key).unwrap();
        Self {
            issuer: Issuer::new(params, key),
            der: certificate.der().clone(),
            pem: certificate.pem(),
        }
    }

    /// A key and its certificate, in PEM and DER.
    fn issue(&self, purpose: ExtendedKeyUsagePurpose) -> Issued {
        let key = KeyPair::generate().unwrap();
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages = vec![purpose];
        params.not_after = rcgen::date_time_ymd(2090, 1, 1);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        Issued {
            certificate: certificate.der().clone(),
            certificate_pem: certificate.pem(),
            key,
        }
    }

    /// What a client of it does, with a certificate of its own or without.
    pub(crate) fn client(
        &self,
        own: Option<&Issued>,
        versions: &[&'static rustls::SupportedProtocolVersion],
    ) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots.add(self.der.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider);
        let builder = builder.with_protocol_versions(versions).unwrap();
        let builder = builder.with_root_certificates(roots);
        match own {
            None => builder.with_no_client_auth(),
            Some(own) => {
                let key = PrivatePkcs8KeyDer::from(own.key.serialize_der());
                let chain = vec![own.certificate.clone()];
                builder.with_client_auth_cert(chain, key.into()).unwrap()
            }
        }
    }
}

pub(crate) struct Issued {
    certificate: CertificateDer<'static>,
    certificate_pem: String,
    key: KeyPair,
}

impl Issued {
    fn write(&self, folder: &Path) {
        fs_err::write(folder.join("cert.pem"), &self.certificate_pem).unwrap();
        fs_err::write(folder.join("key.pem"), self.key.serialize_pem()).unwrap();
    }
}

const PEM: [&str; 2] = ["certificate_file=cert.pem", "private_key_file=key.pem"];

fn encrypted(authority: &Authority, lines: &[&str]) -> Server {
    let server = server().https().trusting(&authority.der);
    let server = server.echo_model("m", "minWorkers: 1\nmaxWorkers: 1");
    let server = server.args(&["--models", "m"]);
    lines
        .iter()
        .fold(server, |server, line| server.config(line))
}

/// A server with a certificate of this authority, that has not been started; its files lie in its
/// folder.
pub(crate) fn certified(authority: &Authority, more: &[&str]) -> Server {
    let server = encrypted(authority, &[&PEM[..], more].concat());
    let issued = authority.issue(ExtendedKeyUsagePurpose::ServerAuth);
    issued.write(server.folder());
    server
}

/// The same, running.
pub(crate) fn serving(authority: &Authority, more: &[&str]) -> Running {
    let server = certified(authority, more).start();
    server.wait_ready("m");
    server
}

pub(crate) fn place(url: &str) -> &str {
    url.split_once("://").unwrap().1
}

/// A connection of one client, which has shaken hands.
pub(crate) fn connect(
    url: &str,
    config: ClientConfig,
) -> std::io::Result<StreamOwned<ClientConnection, TcpStream>> {
    let name = ServerName::try_from("localhost").unwrap();
    let client = ClientConnection::new(Arc::new(config), name).unwrap();
    let socket = TcpStream::connect(place(url)).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let mut stream = StreamOwned::new(client, socket);
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock)?;
    }
    Ok(stream)
}

const PING: &[u8] = b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";

fn ping(stream: &mut (impl Read + Write)) -> std::io::Result<String> {
    stream.write_all(PING)?;
    let mut answer = Vec::new();
    let _no_notice = stream.read_to_end(&mut answer);
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[test]
fn every_listener_speaks_tls_and_says_so() {
    let authority = Authority::new();
    let server = serving(&authority, &[]);
    for url in [&server.inference, &server.management, &server.metrics] {
        assert!(url.starts_with("https://127.0.0.1:"), "{url}");
        assert!(server.output().contains(&format!("listening at {url}")));
    }
    let requests = [server.infer("OPTIONS", "/"), server.manage("OPTIONS", "/")];
    for request in requests {
        let described = request.send().expect(200).json();
        assert_eq!(described["openapi"], "3.0.1");
    }
    let metrics = format!("{}/", server.metrics);
    let request =
        ts_test::Request::new("OPTIONS", metrics).trusting(Some(authority.der.as_ref().into()));
    request.send().expect(200);
    let large = vec![b'x'; 3 << 20];
    let answer = server
        .infer("POST", "/predictions/m")
        .body(large.clone())
        .send();
    assert!(answer.expect(200).body == large);
    server.metrics("/metrics").send().expect(200);
    // Each has its own APIs.
    server.infer("GET", "/models").send().expect(404);
    // Who does not know the authority does not connect.
    let stranger = Authority::new();
    let url = format!("{}/ping", server.inference);
    let request = ts_test::Request::new("GET", url).trusting(Some(stranger.der.as_ref().into()));
    assert!(request.try_send().is_err());
}

#[test]
fn both_versions_of_tls_are_spoken() {
    let authority = Authority::new();
    let server = serving(&authority, &[]);
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let mut stream = connect(&server.inference, authority.client(None, &[version])).unwrap();
        assert!(ping(&mut stream).unwrap().starts_with("HTTP/1.1 200"));
    }
}

#[test]
fn some_listeners_may_be_plain_and_two_apis_may_share_an_encrypted_one() {
    let authority = Authority::new();
    let server = encrypted(&authority, &PEM);
    authority
        .issue(ExtendedKeyUsagePurpose::ServerAuth)
        .write(server.folder());
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let socket = server.folder().join("metrics.sock");
    let server = server
        .config(&format!("inference_address=https://127.0.0.1:{port}"))
        .config(&format!("management_address=https://127.0.0.1:{port}"))
        .config(&format!("metrics_address=unix:{}", socket.display()));
    let server = server.start();
    assert_eq!(server.inference, server.management);
    server.infer("GET", "/ping").send().expect(200);
    server.infer("GET", "/models").send().expect(200);
    assert_eq!(server.metrics, format!("unix:{}", socket.display()));

    let mixed = encrypted(&authority, &PEM).config("metrics_address=http://127.0.0.1:0");
    authority
        .issue(ExtendedKeyUsagePurpose::ServerAuth)
        .write(mixed.folder());
    let mixed = mixed.start();
    assert!(mixed.metrics.starts_with("http://"));
    mixed.metrics("/metrics").send().expect(200);
    mixed.infer("GET", "/ping").send().expect(200);
}

#[test]
fn one_is_generated_where_none_is_configured() {
    let server = server().https().start();
    server.wait_until("it is told", || {
        server.output().contains("no certificate is configured")
    });
    let socket = TcpStream::connect(place(&server.inference)).unwrap();
    let answer = ping(&mut { socket }).unwrap();
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
    assert!(answer.contains("This TorchServe instance only accepts HTTPS requests"));
    // It is no certificate of an authority.
    let authority = Authority::new();
    let stranger = authority.client(None, rustls::ALL_VERSIONS);
    assert!(connect(&server.inference, stranger).is_err());
}

#[test]
fn who_does_not_speak_tls_is_sent_away_in_time_and_holds_nothing() {
    let authority = Authority::new();
    let server = serving(&authority, &["tls_handshake_timeout=1"]);
    let files = || {
        fs_err::read_dir(format!("/proc/{}/fd", server.pid()))
            .unwrap()
            .count()
    };
    server.infer("GET", "/ping").send().expect(200);
    let before = files();
    let begun = Instant::now();
    let mut clients: Vec<_> = (0..50)
        .map(|number| {
            let mut client = TcpStream::connect(place(&server.inference)).unwrap();
            match number % 3 {
                // Says nothing, says a part of what it should, says what nobody knows.
                0 => {}
                1 => client.write_all(&[22, 3, 1, 2, 0, 1]).unwrap(),
                _ => client.write_all(&[0xff; 64]).unwrap(),
            }
            client
        })
        .collect();
    server.infer("GET", "/ping").send().expect(200);
    for client in &mut clients {
        let limit = Some(Duration::from_secs(20));
        client.set_read_timeout(limit).unwrap();
        let mut left = Vec::new();
        // Reset, or closed.
        let _reset = client.read_to_end(&mut left);
        assert!(left.len() < 100, "an alert at most");
    }
    assert!(begun.elapsed() < Duration::from_secs(15));
    drop(clients);
    server.wait_until("its files are those of before", || files() <= before + 1);
}

#[test]
fn clients_need_a_certificate_where_an_authority_of_theirs_is_named() {
    let authority = Authority::new();
    let clients = Authority::new();
    let server = encrypted(
        &authority,
        &[&PEM[..], &["client_ca_file=clients.pem"]].concat(),
    );
    authority
        .issue(ExtendedKeyUsagePurpose::ServerAuth)
        .write(server.folder());
    fs_err::write(server.folder().join("clients.pem"), &clients.pem).unwrap();
    let server = server.start();
    let known = clients.issue(ExtendedKeyUsagePurpose::ClientAuth);
    let unknown = authority.issue(ExtendedKeyUsagePurpose::ClientAuth);
    let answer = |own: Option<&Issued>| {
        let config = authority.client(own, rustls::ALL_VERSIONS);
        // With TLS 1.3 a client learns of its refusal with the answer.
        connect(&server.inference, config).and_then(|mut stream| ping(&mut stream))
    };
    assert!(answer(Some(&known)).unwrap().starts_with("HTTP/1.1 200"));
    for refused in [answer(None), answer(Some(&unknown))] {
        assert!(
            refused.as_ref().map_or(true, String::is_empty),
            "{refused:?}"
        );
    }
}

#[test]
fn renewed_certificates_are_taken_up_and_bad_ones_are_told() {
    let authority = Authority::new();
    let server = serving(&authority, &[]);
    let renewed = authority.issue(ExtendedKeyUsagePurpose::ServerAuth);
    let shown = || {
        let client = authority.client(None, rustls::ALL_VERSIONS);
        let stream = connect(&server.inference, client).unwrap();
        stream.conn.peer_certificates().unwrap()[0].clone()
    };
    let before = shown();
    renewed.write(server.folder());
    server.wait_until("the new one is shown", || shown() == renewed.certificate);
    assert!(before != renewed.certificate);
    fs_err::write(server.folder().join("key.pem"), "nothing").unwrap();
    server.wait_until("it is told", || {
        server
            .output()
            .contains("the renewed files of TLS cannot be used")
    });
    assert!(shown() == renewed.certificate, "the one before stays");
}

#[test]
fn what_is_wrong_with_the_files_ends_the_start() {
    let authority = Authority::new();
    let issued = authority.issue(ExtendedKeyUsagePurpose::ServerAuth);
    let other = authority.issue(ExtendedKeyUsagePurpose::ServerAuth);
    for (lines, words) in [
        (
            &["certificate_file=cert.pem"][..],
            "`private_key_file` is needed as well",
        ),
        (
            &["certificate_file=cert.pem", "private_key_file=none.pem"],
            "none.pem",
        ),
        (
            &["certificate_file=cert.pem", "private_key_file=other.pem"],
            "does not belong",
        ),
        (
            &["certificate_file=empty.pem", "private_key_file=key.pem"],
            "has no certificate",
        ),
        (&["keystore=cert.pem", "keystore_pass=hunter2"], "PKCS#12"),
        (&["keystore=x", "keystore_type=BKS"], "Use `PKCS12`"),
        (
            &["inference_address=https+unix:/tmp/s"],
            "Write `unix:/tmp/s`",
        ),
    ] {
        let server = encrypted(&authority, lines);
        issued.write(server.folder());
        fs_err::write(server.folder().join("other.pem"), other.key.serialize_pem()).unwrap();
        fs_err::write(server.folder().join("empty.pem"), "").unwrap();
        let (status, output) = server.start_and_fail();
        assert_eq!(status.code(), Some(1), "{output}");
        assert!(output.contains(words), "{words}: {output}");
        assert!(!output.contains("hunter2"), "{output}");
    }
    let two_schemes = server()
        .config("inference_address=https://127.0.0.1:4711")
        .config("management_address=http://127.0.0.1:4711");
    let (_, output) = two_schemes.start_and_fail();
    assert!(
        output.contains("Write both with the same scheme"),
        "{output}"
    );
}

pub(crate) fn has(tool: &str) -> bool {
    Command::new(tool).arg("--help").output().is_ok()
}

/// Runs a tool in a folder where that must succeed.
fn run(folder: &Path, tool: &str, arguments: &str) -> String {
    let arguments = arguments.split(' ');
    let ran = Command::new(tool)
        .args(arguments)
        .current_dir(folder)
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{tool}: {error}");
    String::from_utf8_lossy(&ran.stdout).into_owned()
}

/// Key stores as openssl writes them, of today's algorithms and of those before.
#[test]
fn key_stores_of_openssl_are_read() {
    if !has("openssl") {
        return;
    }
    let authority = Authority::new();
    for legacy in ["", " -legacy"] {
        let lines = ["keystore=store.p12", "keystore_pass=Pass-w\u{f6}rd"];
        let server = encrypted(&authority, &lines);
        let folder = server.folder().to_owned();
        authority
            .issue(ExtendedKeyUsagePurpose::ServerAuth)
            .write(&folder);
        fs_err::write(folder.join("ca.pem"), &authority.pem).unwrap();
        let export = "pkcs12 -export -inkey key.pem -in cert.pem -certfile ca.pem -out store.p12";
        let password = "-passout pass:Pass-w\u{f6}rd";
        run(&folder, "openssl", &format!("{export} {password}{legacy}"));
        let server = server.start();
        server.infer("GET", "/ping").send().expect(200);
        assert!(!server.output().contains("Pass-w"));
        let wrong = server.stop_in_order().config("keystore_pass=other");
        let (_, output) = wrong.start_and_fail();
        assert!(
            output.contains("`keystore_pass` is not the password of `store.p12`"),
            "{output}"
        );
    }
}

/// Key stores as keytool writes them, with TorchServe's default password, and what it cannot have.
#[test]
fn key_stores_of_keytool_are_read() {
    if !has("keytool") {
        return;
    }
    let generate = "-genkeypair -alias server -keyalg RSA -keysize 2048 -dname CN=localhost -ext \
                    san=dns:localhost,ip:127.0.0.1 -validity 30 -storepass changeit";
    let authority = Authority::new();
    for legacy in ["", " -J-Dkeystore.pkcs12.legacy"] {
        let server = encrypted(&authority, &["keystore=store.p12"]);
        let folder = server.folder().to_owned();
        run(
            &folder,
            "keytool",
            &format!("{generate} -storetype PKCS12 -keystore store.p12{legacy}"),
        );
        let export =
            "-exportcert -alias server -storepass changeit -keystore store.p12 -file own.der";
        run(&folder, "keytool", export);
        let own = fs_err::read(folder.join("own.der")).unwrap();
        let server = server.trusting(&own).start();
        server.infer("GET", "/ping").send().expect(200);
    }
    let jks = encrypted(&authority, &["keystore=store.jks", "keystore_type=JKS"]);
    run(
        jks.folder(),
        "keytool",
        &format!("{generate} -storetype JKS -keystore store.jks"),
    );
    let (_, output) = jks.start_and_fail();
    assert!(
        output.contains("keytool -importkeystore -srckeystore store.jks"),
        "{output}"
    );

    let without = encrypted(&authority, &["keystore=trust.p12"]);
    let folder = without.folder().to_owned();
    authority
        .issue(ExtendedKeyUsagePurpose::ServerAuth)
        .write(&folder);
    let import =
        "-importcert -noprompt -alias ca -storepass changeit -storetype PKCS12 -file cert.pem";
    run(&folder, "keytool", &format!("{import} -keystore trust.p12"));
    let (_, output) = without.start_and_fail();
    assert!(
        output.contains("has no entry with a private key"),
        "{output}"
    );
}

/// Keys in the forms that openssl writes: PKCS#8, PKCS#1 and SEC1.
#[test]
fn keys_come_in_three_forms() {
    if !has("openssl") {
        return;
    }
    let authority = Authority::new();
    for (generate, convert) in [
        (
            "genrsa -out raw.pem 2048",
            "rsa -in raw.pem -traditional -out key.pem",
        ),
        (
            "genrsa -out raw.pem 2048",
            "pkcs8 -topk8 -nocrypt -in raw.pem -out key.pem",
        ),
        (
            "ecparam -name prime256v1 -genkey -out raw.pem",
            "ec -in raw.pem -out key.pem",
        ),
    ] {
        let server = encrypted(&authority, &PEM);
        let folder = server.folder().to_owned();
        run(&folder, "openssl", generate);
        run(&folder, "openssl", convert);
        let extensions = "basicConstraints=CA:FALSE\nsubjectAltName=DNS:localhost,IP:127.0.0.1\n";
        fs_err::write(folder.join("extensions"), extensions).unwrap();
        let request = "req -new -key key.pem -subj /CN=localhost -out request.pem";
        run(&folder, "openssl", request);
        let sign = "x509 -req -in request.pem -signkey key.pem -days 3 -extfile extensions";
        run(&folder, "openssl", &format!("{sign} -out cert.pem"));
        run(
            &folder,
            "openssl",
            "x509 -in cert.pem -outform DER -out own.der",
        );
        let own = fs_err::read(folder.join("own.der")).unwrap();
        let server = server.trusting(&own).start();
        server.infer("GET", "/ping").send().expect(200);
    }
}

#[test]
fn curl_speaks_http_2() {
    if !has("curl") {
        return;
    }
    let authority = Authority::new();
    let server = serving(&authority, &[]);
    fs_err::write(server.folder().join("ca.pem"), &authority.pem).unwrap();
    let body = "y".repeat(2 << 20);
    fs_err::write(server.folder().join("body"), &body).unwrap();
    let call = "-sS --http2 --cacert ca.pem -w %{http_version}/%{http_code}";
    let url = server.inference.replace("127.0.0.1", "localhost");
    let sent = run(
        server.folder(),
        "curl",
        &format!("{call} -H content-type:text/plain --data-binary @body {url}/predictions/m"),
    );
    assert!(sent == format!("{body}2/200"), "{} bytes", sent.len());
    let none = run(server.folder(), "curl", &format!("{call} {url}/none"));
    assert!(none.ends_with("2/404"), "{none}");
}
