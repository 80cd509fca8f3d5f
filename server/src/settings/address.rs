//! The syntax of listener addresses (*torchserve-contract* 2.4).

use std::fmt;

/// Where a listener binds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    /// Name or IPv4 address.
    pub(crate) host: String,
    /// Port; 0 takes a free one.
    pub(crate) port: u16,
}

impl Address {
    /// Reads `http://host[:port]`.
    ///
    /// # Errors
    /// TorchServe's words for a malformed one, ours for a kind that is not served yet.
    pub(crate) fn parse(text: &str, default_port: u16) -> Result<Self, String> {
        if text.starts_with("https://") {
            return Err(format!(
                "TLS is not served yet, `{text}` needs it. Use `http://`"
            ));
        }
        if text.starts_with("unix:") {
            return Err(format!(
                "unix sockets are not served yet, `{text}` is one. Use `http://`"
            ));
        }
        let invalid = || format!("Invalid binding address: {text}");
        let rest = text.strip_prefix("http://").ok_or_else(invalid)?;
        let (host, port) = match rest.rsplit_once(':') {
            None => (rest, default_port),
            Some((host, port)) => {
                let number = port.parse().ok().filter(|number| *number < u16::MAX);
                (
                    host,
                    number.ok_or_else(|| format!("Invalid port number: {text}"))?,
                )
            }
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if host.is_empty() || !host.chars().all(plain) {
            return Err(invalid());
        }
        Ok(Self {
            host: host.to_owned(),
            port,
        })
    }

    /// Whether other machines may reach it.
    pub(crate) fn is_wildcard(&self) -> bool {
        self.host == "0.0.0.0"
    }
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "http://{}:{}", self.host, self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_or_taken_from_the_default() {
        let parsed = Address::parse("http://0.0.0.0", 80).unwrap();
        assert_eq!((parsed.host.as_str(), parsed.port), ("0.0.0.0", 80));
        assert!(parsed.is_wildcard());
        assert_eq!(Address::parse("http://localhost:0", 80).unwrap().port, 0);
    }

    #[test]
    fn malformed_addresses_are_told_in_the_known_words() {
        for bad in [
            "127.0.0.1:8080",
            "http://",
            "http://h:1/",
            "http://[::1]:80",
            "ftp://h",
        ] {
            let error = Address::parse(bad, 80).unwrap_err();
            assert!(error.starts_with("Invalid "), "{bad}: {error}");
        }
        for bad in ["http://h:65535", "http://h:-1", "http://h:x", "http://h:"] {
            assert_eq!(
                Address::parse(bad, 80).unwrap_err(),
                format!("Invalid port number: {bad}")
            );
        }
    }

    #[test]
    fn kinds_not_served_yet_are_named() {
        assert!(
            Address::parse("https://h:1", 80)
                .unwrap_err()
                .contains("TLS")
        );
        assert!(
            Address::parse("unix:/tmp/s", 80)
                .unwrap_err()
                .contains("unix")
        );
    }
}
