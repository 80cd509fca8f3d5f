//! The syntax of listener addresses (*torchserve-contract* 2.4).

use std::fmt;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};

/// Bytes that the path of a unix socket may have; the system keeps one more for its end.
const MAX_SOCKET_PATH: usize = 107;

/// Where a listener binds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// A port of the network.
    Tcp {
        /// A name, an IPv4 address, or an IPv6 address without its brackets, perhaps with a zone.
        host: String,
        /// 0 takes a free one.
        port: u16,
        /// Whether TLS is spoken there.
        tls: bool,
    },
    /// A socket in the file system.
    Unix(PathBuf),
}

/// The ports of an API where none is said.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DefaultPorts {
    /// Without TLS.
    pub(crate) http: u16,
    /// With it.
    pub(crate) https: u16,
}

impl Address {
    /// Reads `http://host[:port]`, `https://host[:port]` or `unix:/path`.
    ///
    /// # Errors
    /// TorchServe's words for a malformed one, ours for what is not served or cannot be.
    pub(crate) fn parse(text: &str, ports: DefaultPorts) -> Result<Self, String> {
        let invalid = || format!("Invalid binding address: {text}");
        let (scheme, rest) = text.split_once(':').ok_or_else(invalid)?;
        let scheme = scheme.to_ascii_lowercase();
        match scheme.as_str() {
            "http" | "https" => {
                let tls = scheme == "https";
                let authority = rest.strip_prefix("//").ok_or_else(invalid)?;
                let (host, port) = Self::parse_authority(text, authority)?;
                let port = port.unwrap_or(if tls { ports.https } else { ports.http });
                Ok(Self::Tcp { host, port, tls })
            }
            "unix" => Self::parse_path(text, rest),
            "https+unix" | "unix+https" => Err(format!(
                "`{text}`: TLS is not spoken on unix sockets, whose file says who may connect. \
                 Write `unix:{rest}`"
            )),
            _ => Err(invalid()),
        }
    }

    fn parse_authority(text: &str, authority: &str) -> Result<(String, Option<u16>), String> {
        let invalid = || format!("Invalid binding address: {text}");
        let (host, port) = match authority.strip_prefix('[') {
            Some(literal) => {
                let (literal, port) = literal.split_once(']').ok_or_else(invalid)?;
                (ipv6(literal).ok_or_else(invalid)?, port)
            }
            None => {
                let end = authority.find(':').unwrap_or(authority.len());
                let (host, port) = authority.split_at(end);
                let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
                if host.is_empty() || !host.chars().all(plain) {
                    return Err(invalid());
                }
                (host.to_owned(), port)
            }
        };
        let port = match port.strip_prefix(':') {
            None if port.is_empty() => None,
            None => return Err(invalid()),
            Some(port) => {
                let number = port.parse().ok().filter(|number| *number < u16::MAX);
                Some(number.ok_or_else(|| format!("Invalid port number: {text}"))?)
            }
        };
        Ok((host, port))
    }

    fn parse_path(text: &str, path: &str) -> Result<Self, String> {
        let is_named = Path::new(path).file_name().is_some();
        if !path.starts_with('/') || path.ends_with('/') || path.contains('\0') || !is_named {
            return Err(format!(
                "Invalid binding address: {text}. A unix socket is written as `unix:/folder/name`"
            ));
        }
        if path.len() > MAX_SOCKET_PATH {
            return Err(format!(
                "the path in `{text}` has {} bytes, that of a unix socket may have \
                 {MAX_SOCKET_PATH}. Use a shorter one",
                path.len()
            ));
        }
        // Doubled slashes and the like do not make two sockets of one.
        Ok(Self::Unix(Path::new(path).components().collect()))
    }

    /// Whether other machines may reach it.
    pub(crate) fn is_wildcard(&self) -> bool {
        matches!(self, Self::Tcp { host, .. } if host == "0.0.0.0" || host == "::")
    }

    /// Whether TLS is spoken there.
    pub(crate) fn is_encrypted(&self) -> bool {
        matches!(self, Self::Tcp { tls: true, .. })
    }

    /// Whether both cannot be bound: a port of 0 is another one each time.
    pub(crate) fn is_place_of(&self, other: &Self) -> bool {
        match (self, other) {
            (
                Self::Tcp { host, port, .. },
                Self::Tcp {
                    host: other,
                    port: others,
                    ..
                },
            ) => *port != 0 && (host, port) == (other, others),
            _ => self == other,
        }
    }
}

/// The address without its brackets in its usual form, with its zone, which is written after `%`
/// or, as in URLs, after `%25`.
fn ipv6(literal: &str) -> Option<String> {
    let (address, zone) = match literal.split_once('%') {
        None => (literal, None),
        Some((address, zone)) => (address, Some(zone.strip_prefix("25").unwrap_or(zone))),
    };
    let address: Ipv6Addr = address.parse().ok()?;
    match zone {
        None => Some(address.to_string()),
        Some(zone) => {
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
            let usable = !zone.is_empty() && zone.chars().all(plain);
            usable.then(|| format!("{address}%{zone}"))
        }
    }
}

/// What an address of TCP begins with.
pub(crate) fn scheme(tls: bool) -> &'static str {
    if tls { "https" } else { "http" }
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port, tls } if host.contains(':') => {
                // A zone that begins as the other form of the sign does is shown in that form.
                let host = host.replacen("%25", "%2525", 1);
                write!(out, "{}://[{host}]:{port}", scheme(*tls))
            }
            Self::Tcp { host, port, tls } => write!(out, "{}://{host}:{port}", scheme(*tls)),
            Self::Unix(path) => write!(out, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORTS: DefaultPorts = DefaultPorts {
        http: 80,
        https: 443,
    };

    fn tcp(host: &str, port: u16) -> Address {
        let host = host.to_owned();
        let tls = false;
        Address::Tcp { host, port, tls }
    }

    #[test]
    fn ports_are_read_or_taken_from_the_default() {
        let parsed = Address::parse("http://0.0.0.0", PORTS).unwrap();
        assert_eq!(parsed, tcp("0.0.0.0", 80));
        assert!(parsed.is_wildcard());
        assert_eq!(
            Address::parse("HTTP://localhost:0", PORTS),
            Ok(tcp("localhost", 0))
        );
    }

    /// CF-13.
    #[test]
    fn addresses_of_ipv6_stand_in_brackets() {
        for (text, host, port, shown) in [
            ("http://[::1]:8080", "::1", 8080, "http://[::1]:8080"),
            ("http://[::]", "::", 80, "http://[::]:80"),
            ("http://[0:0::1]:1", "::1", 1, "http://[::1]:1"),
            ("http://[::%2525t]:1", "::%25t", 1, "http://[::%2525t]:1"),
            (
                "http://[fe80::1%eth0]:1",
                "fe80::1%eth0",
                1,
                "http://[fe80::1%eth0]:1",
            ),
            (
                "http://[fe80::1%25eth0]:1",
                "fe80::1%eth0",
                1,
                "http://[fe80::1%eth0]:1",
            ),
        ] {
            let parsed = Address::parse(text, PORTS).unwrap();
            assert_eq!(parsed, tcp(host, port), "{text}");
            assert_eq!(parsed.to_string(), shown);
        }
        assert!(Address::parse("http://[::]", PORTS).unwrap().is_wildcard());
    }

    #[test]
    fn a_unix_socket_has_an_absolute_path_that_the_system_can_hold() {
        let socket = |path: &str| Ok(Address::Unix(path.into()));
        assert_eq!(Address::parse("unix:/tmp/a b", PORTS), socket("/tmp/a b"));
        assert_eq!(Address::parse("unix:///tmp//s", PORTS), socket("/tmp/s"));
        let longest = format!("/{}", "x".repeat(106));
        assert_eq!(
            Address::parse(&format!("unix:{longest}"), PORTS),
            socket(&longest)
        );
        let error = Address::parse(&format!("unix:{longest}x"), PORTS).unwrap_err();
        assert!(
            error.contains("108 bytes") && error.contains("107"),
            "{error}"
        );
        for bad in [
            "unix:",
            "unix:s",
            "unix:/",
            "unix:/.",
            "unix:/tmp/..",
            "unix:/tmp/",
            "unix:/a\0b",
        ] {
            let error = Address::parse(bad, PORTS).unwrap_err();
            assert!(error.starts_with("Invalid binding address: "), "{error}");
        }
    }

    #[test]
    fn malformed_addresses_are_told_in_the_known_words() {
        for bad in [
            "127.0.0.1:8080",
            "http://",
            "http:",
            "http://h/",
            "http://::1",
            "http://::1:80",
            "http://[::1",
            "http://[::1]80",
            "http://[]:80",
            "http://[h]:80",
            "http://[::1%]:80",
            "http://[::1%a/b]:80",
            "ftp://h",
            "",
        ] {
            assert_eq!(
                Address::parse(bad, PORTS).unwrap_err(),
                format!("Invalid binding address: {bad}")
            );
        }
        for bad in [
            "http://h:65535",
            "http://h:-1",
            "http://h:x",
            "http://h:",
            "http://h:1/",
            "http://[::1]:65536",
        ] {
            assert_eq!(
                Address::parse(bad, PORTS).unwrap_err(),
                format!("Invalid port number: {bad}")
            );
        }
    }

    #[test]
    fn https_is_tls_on_a_port_of_its_own_and_never_on_a_unix_socket() {
        let parsed = Address::parse("HTTPS://h", PORTS).unwrap();
        assert!(parsed.is_encrypted());
        assert_eq!(parsed.to_string(), "https://h:443");
        let plain = Address::parse("http://h:443", PORTS).unwrap();
        assert!(parsed != plain && parsed.is_place_of(&plain));
        let free = Address::parse("https://h:0", PORTS).unwrap();
        assert!(!free.is_place_of(&free));
        let error = Address::parse("https+unix:/s", PORTS).unwrap_err();
        assert!(error.ends_with("Write `unix:/s`"), "{error}");
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read_or_refused_and_reads_as_it_is_shown(text in "(http://|https://|unix:|HTTP:|)\\PC{0,20}") {
            if let Ok(address) = Address::parse(&text, PORTS) {
                proptest::prop_assert_eq!(Address::parse(&address.to_string(), PORTS), Ok(address));
            }
        }
    }
}
