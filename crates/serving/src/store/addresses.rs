//! Which addresses the server may be sent to: the operator's list, and the places that hand out
//! credentials to whoever asks from this machine.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use percent_encoding::percent_decode_str;
use regex::RegexSet;
use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use url::Host;

/// Whether any reading of the text climbs up: percent-encoding may be decoded more than once on
/// the way to a file.
pub(super) fn is_relative(url: &str) -> bool {
    let mut text = url.to_owned();
    for _ in 0..3 {
        if text.contains("..") || text.contains('\0') {
            return true;
        }
        let decoded = percent_decode_str(&text).decode_utf8_lossy().into_owned();
        if decoded == text {
            return false;
        }
        text = decoded;
    }
    true
}

/// Whether the operator's list lets the server fetch from `url`.
///
/// Cloud metadata services and other link-local addresses hand out credentials to whoever asks from
/// this machine; the default list allows every host, so these need a pattern that names them. A user
/// name in a URL can make it look like another host's and is never allowed.
pub(super) fn may_fetch(allowed: &RegexSet, url: &Url) -> bool {
    if !url.username().is_empty() || url.password().is_some() {
        return false;
    }
    if !allowed.is_match(url.as_str()) {
        return false;
    }
    let guarded = match url.host() {
        Some(Host::Ipv4(address)) => is_guarded(address.into()),
        Some(Host::Ipv6(address)) => is_guarded(address.into()),
        Some(Host::Domain(name)) => name
            .trim_end_matches('.')
            .eq_ignore_ascii_case("metadata.google.internal"),
        None => false,
    };
    !guarded || url.host_str().is_some_and(|host| is_named(allowed, host))
}

/// Whether a pattern of the list spells this host out, where a URL has its host.
fn is_named(allowed: &RegexSet, host: &str) -> bool {
    let escaped = regex::escape(host);
    allowed.patterns().iter().any(|pattern| {
        let host_part = pattern.split_once("//").map_or("", |(_, rest)| rest);
        let host_part = host_part.split('/').next().unwrap_or_default();
        host_part.contains(&escaped) || host_part.contains(host)
    })
}

/// Metadata services outside the link-local range: Alibaba's, Azure's, Oracle's.
const METADATA_SERVICES: [Ipv4Addr; 3] = [
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(192, 0, 0, 192),
];

fn is_guarded(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => address.is_link_local() || METADATA_SERVICES.contains(&address),
        IpAddr::V6(address) => {
            address.is_unicast_link_local()
                || address == Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)
        }
    }
}

/// Looks names up without the guarded addresses, so that a name cannot stand for one either, unless
/// the operator's list names it.
pub(super) struct GuardedNames {
    pub(super) allowed: RegexSet,
}

impl Resolve for GuardedNames {
    fn resolve(&self, name: Name) -> Resolving {
        let named = is_named(&self.allowed, name.as_str());
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let usable: Vec<SocketAddr> = found
                .filter(|address| named || !is_guarded(address.ip()))
                .collect();
            if usable.is_empty() {
                return Err(format!("`{}` has no address that may be asked", name.as_str()).into());
            }
            Ok(Box::new(usable.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_hand_out_credentials_need_a_pattern_of_their_own() {
        let everything = RegexSet::new([r"^(?i:file://.*|http(s)?://.*)$"]).unwrap();
        let fetch = |allowed: &RegexSet, url: &str| may_fetch(allowed, &Url::parse(url).unwrap());
        for url in [
            "http://169.254.169.254/latest/m.mar",
            "http://2852039166/m.mar",
            "http://0xa9fea9fe/m.mar",
            "http://[::ffff:169.254.169.254]/m.mar",
            "http://[fe80::1]/m.mar",
            "http://[fd00:ec2::254]/m.mar",
            "http://metadata.google.internal/m.mar",
            "http://METADATA.google.internal./m.mar",
            "http://user@example.org/m.mar",
            "http://good.example:pass@169.254.169.254/m.mar",
        ] {
            assert!(!fetch(&everything, url), "{url}");
        }
        assert!(fetch(&everything, "https://example.org/m.mar?sig=1"));
        assert!(fetch(&everything, "http://127.0.0.1:9/m.mar"));
        let named = RegexSet::new([r"^http://169\.254\.169\.254/models/.*$"]).unwrap();
        assert!(fetch(&named, "http://169.254.169.254/models/m.mar"));
        // Mentioned, but not as the host.
        let beside = RegexSet::new([r"^http://.*/169\.254\.169\.254/.*$"]).unwrap();
        assert!(!fetch(
            &beside,
            "http://169.254.169.254/169.254.169.254/m.mar"
        ));
    }

    #[test]
    fn no_spelling_of_a_parent_folder_passes() {
        for url in [
            "../m.mar",
            "a/../m.mar",
            "file:///ok/../m.mar",
            "file:///ok/%2e%2e/m.mar",
            "file:///ok/%252e%252e/m.mar",
            "file:///ok/%25252e%25252e/m.mar",
            "m%00.mar",
        ] {
            assert!(is_relative(url), "{url} passed");
        }
        for url in [
            "m.mar",
            "file:///a/b.mar",
            "https://h/m.mar?sig=x%2By",
            "100%.mar",
        ] {
            assert!(!is_relative(url), "{url} was refused");
        }
    }
}
