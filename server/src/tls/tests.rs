use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use super::*;

/// A key and a certificate for it that an authority has signed, in files of a folder.
struct Pair {
    folder: TempDir,
    key: KeyPair,
}

impl Pair {
    fn new() -> Self {
        Self::valid(|_| ())
    }

    fn valid(set: impl FnOnce(&mut CertificateParams)) -> Self {
        let authority_key = KeyPair::generate().unwrap();
        let mut authority = CertificateParams::new(Vec::new()).unwrap();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority_certificate = authority.self_signed(&authority_key).unwrap();
        let issuer = Issuer::new(authority, authority_key);
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        set(&mut params);
        let certificate = params.signed_by(&key, &issuer).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let pair = Self { folder, key };
        pair.write("key.pem", &pair.key.serialize_pem());
        pair.write(
            "cert.pem",
            &(certificate.pem() + &authority_certificate.pem()),
        );
        pair
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs_err::write(self.path(name), text).unwrap();
    }

    fn settings(&self) -> TlsSettings {
        let (key, chain) = (self.path("key.pem"), self.path("cert.pem"));
        TlsSettings {
            source: Source::Pem { key, chain },
            client_ca: None,
        }
    }
}

fn told(settings: &TlsSettings) -> String {
    ts_types::with_causes(&settings.load().map(|_| ()).unwrap_err())
}

fn of_keystore(file: &Path) -> TlsSettings {
    TlsSettings {
        source: Source::Keystore {
            file: file.to_owned(),
            password: SecretString::from("hunter2"),
        },
        client_ca: None,
    }
}

#[test]
fn a_pair_is_taken_with_its_chain_and_both_protocols() {
    let (config, pair) = Pair::new().settings().load().unwrap();
    assert_eq!(pair.cert.len(), 2);
    assert_eq!(config.alpn_protocols, [&b"h2"[..], b"http/1.1"]);
}

#[test]
fn what_is_wrong_with_the_files_is_told_with_the_file() {
    let pair = Pair::new();
    let other = KeyPair::generate().unwrap().serialize_pem();
    let garbage = "-----BEGIN CERTIFICATE-----\n%%%\n-----END CERTIFICATE-----\n";
    let encrypted =
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----";
    for (file, text, words) in [
        ("key.pem", "", "has no private key in PEM"),
        (
            "key.pem",
            other.as_str(),
            "does not belong to the first certificate",
        ),
        ("key.pem", encrypted, "is encrypted. Decrypt it"),
        ("cert.pem", "", "has no certificate"),
        ("cert.pem", garbage, "is not valid"),
        (
            "cert.pem",
            &"x".repeat(2 << 20),
            "is not a file of at most 1048576 bytes",
        ),
    ] {
        let path = pair.path(file);
        let before = fs_err::read_to_string(&path).unwrap();
        pair.write(file, text);
        let error = told(&pair.settings());
        assert!(error.contains(words) && error.contains(file), "{error}");
        pair.write(file, &before);
    }
    let absent = TlsSettings {
        source: Source::Pem {
            key: pair.path("none.pem"),
            chain: pair.path("cert.pem"),
        },
        client_ca: None,
    };
    let error = told(&absent);
    assert!(
        error.contains("`private_key_file`") && error.contains("none.pem"),
        "{error}"
    );
    let folder = TlsSettings {
        client_ca: Some(pair.folder.path().to_owned()),
        ..pair.settings()
    };
    assert!(told(&folder).contains("(`client_ca_file`) is not a file"));
}

#[test]
fn a_certificate_that_clients_would_refuse_is_told() {
    let expired = Pair::valid(|params| params.not_after = rcgen::date_time_ymd(2020, 1, 2));
    let error = told(&expired.settings());
    assert!(
        error.contains("is valid from") && error.contains("2020"),
        "{error}"
    );
    let early = Pair::valid(|params| params.not_before = rcgen::date_time_ymd(2090, 1, 2));
    assert!(told(&early.settings()).contains("2090"));
}

#[test]
fn what_is_no_key_store_is_told_without_its_password() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("store");
    for (bytes, words) in [
        (&b""[..], "cannot be read as PKCS#12"),
        (b"junk", "cannot be read as PKCS#12"),
        (&[0xfe, 0xed, 0xfe, 0xed, 0, 0], "keytool -importkeystore"),
    ] {
        fs_err::write(&file, bytes).unwrap();
        let error = told(&of_keystore(&file));
        assert!(error.contains(words) && error.contains("store"), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
    assert!(!format!("{:?}", of_keystore(&file)).contains("hunter2"));
}

#[test]
fn renewed_files_are_taken_up_and_bad_ones_are_not() {
    let (first, second) = (Pair::new(), Pair::new());
    let tls = Tls::load(first.settings()).unwrap();
    let before = tls.config();
    let seen = tls.look(tls.first.clone());
    assert!(Arc::ptr_eq(&before, &tls.config()), "nothing has changed");
    let copy = |name: &str| fs_err::copy(second.path(name), first.path(name)).unwrap();
    copy("key.pem");
    let seen = tls.look(seen);
    assert!(
        Arc::ptr_eq(&before, &tls.config()),
        "half of a pair is none"
    );
    copy("cert.pem");
    let seen = tls.look(seen);
    assert!(!Arc::ptr_eq(&before, &tls.config()));
    let renewed = tls.config();
    fs_err::remove_file(first.path("key.pem")).unwrap();
    tls.look(seen);
    assert!(Arc::ptr_eq(&renewed, &tls.config()));
}

#[test]
fn one_is_generated_where_none_is_configured() {
    let settings = TlsSettings {
        source: Source::Generated {
            names: vec!["localhost".to_owned(), "::1".to_owned()],
        },
        client_ca: None,
    };
    let (_, pair) = settings.load().unwrap();
    assert_eq!(fingerprint(&pair).len(), 32 * 3 - 1);
}
