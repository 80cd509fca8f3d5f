//! Who sent a request: the peer of its connection, or whom a proxy that is trusted names.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use actix_web::HttpRequest;
use actix_web::http::header::{FORWARDED, HeaderName, X_FORWARDED_FOR};
use ipnet::IpNet;

/// Those whose word on the address of a caller is believed.
#[derive(Debug, Clone, Default)]
pub(crate) struct Proxies {
    networks: Vec<IpNet>,
    unix: bool,
}

/// A caller, as the access log names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Caller {
    /// Its own connection.
    Peer(SocketAddr),
    /// Whom a proxy named.
    Named(IpAddr),
    /// A unix socket.
    Local,
}

impl fmt::Display for Caller {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Peer(address) => write!(out, "/{address}"),
            Self::Named(address) => write!(out, "/{address}"),
            // TorchServe's word for it.
            Self::Local => out.write_str("127.0.0.1"),
        }
    }
}

impl Proxies {
    /// Reads addresses and networks between commas.
    ///
    /// # Errors
    /// Which one is none.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut proxies = Self::default();
        for one in text.split(',').map(str::trim).filter(|one| !one.is_empty()) {
            if one == "unix" {
                proxies.unix = true;
                continue;
            }
            let network = one
                .parse()
                .or_else(|_| one.parse::<IpAddr>().map(IpNet::from));
            let network = network.map_err(|_| {
                format!("`{one}` is neither an address nor a network as `10.0.0.0/8`, nor `unix`")
            })?;
            proxies.networks.push(network);
        }
        Ok(proxies)
    }

    fn trust(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.networks
            .iter()
            .any(|network| network.contains(&address))
    }

    /// Who sent a request.
    pub(crate) fn caller(&self, request: &HttpRequest) -> Caller {
        let peer = request.peer_addr();
        let (seen, trusted) = match peer {
            Some(peer) => (Caller::Peer(peer), self.trust(peer.ip())),
            None => (Caller::Local, self.unix),
        };
        if !trusted {
            return seen;
        }
        // One of the two: of a proxy that sets one, the client may have sent the other.
        let addresses = if request.headers().contains_key(X_FORWARDED_FOR) {
            elements(request, &X_FORWARDED_FOR)
                .map(address_in)
                .collect::<Vec<_>>()
        } else {
            elements(request, &FORWARDED)
                .map(address_in_forwarded)
                .collect()
        };
        // Each proxy adds whom it was called by at the end. The first that is no proxy of ours is
        // the caller; whatever stands before it is the caller's own invention.
        let mut caller = seen;
        for address in addresses.into_iter().rev() {
            let Some(address) = address else { break };
            caller = Caller::Named(address.to_canonical());
            if !self.trust(address) {
                break;
            }
        }
        caller
    }
}

/// The elements of a list that may stand in several headers.
fn elements<'r>(request: &'r HttpRequest, name: &HeaderName) -> impl Iterator<Item = &'r str> {
    let values = request.headers().get_all(name);
    // Of a value that is no text nothing can be believed.
    values.flat_map(|value| value.to_str().unwrap_or("?").split(','))
}

/// `192.0.2.1`, `2001:db8::1` or either with a port, the latter in brackets.
fn address_in(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let bare = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'));
    let bare = bare.unwrap_or(text).parse().ok();
    bare.or_else(|| text.parse::<SocketAddr>().ok().map(|address| address.ip()))
}

/// The `for` of an element of `Forwarded` (RFC 7239).
fn address_in_forwarded(element: &str) -> Option<IpAddr> {
    let mut pairs = element
        .split(';')
        .filter_map(|pair| pair.trim().split_once('='));
    let (_, value) = pairs.find(|(name, _)| name.eq_ignore_ascii_case("for"))?;
    address_in(value.trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use actix_web::test::TestRequest;

    use super::*;

    fn caller(trusted: &str, peer: &str, headers: &[(&'static str, &'static str)]) -> String {
        let mut request = TestRequest::get().peer_addr(peer.parse().unwrap());
        for header in headers {
            request = request.append_header(*header);
        }
        let proxies = Proxies::parse(trusted).unwrap();
        proxies.caller(&request.to_http_request()).to_string()
    }

    const XFF: &str = "x-forwarded-for";

    #[test]
    fn only_a_trusted_proxy_is_believed_lg_03() {
        let forged = [(XFF, "203.0.113.9"), ("forwarded", "for=203.0.113.8")];
        assert_eq!(caller("", "10.0.0.1:5", &forged), "/10.0.0.1:5");
        assert_eq!(caller("10.0.0.0/8", "192.0.2.1:5", &forged), "/192.0.2.1:5");
        assert_eq!(caller("10.0.0.0/8", "10.0.0.1:5", &forged), "/203.0.113.9");
        assert_eq!(
            caller("10.0.0.0/8", "[::ffff:10.0.0.1]:5", &forged),
            "/203.0.113.9"
        );
        assert_eq!(caller("10.0.0.0/8", "10.0.0.1:5", &[]), "/10.0.0.1:5");
    }

    #[test]
    fn what_a_caller_invents_stands_before_what_proxies_add() {
        let trusted = "10.0.0.0/8, 192.0.2.7,::1";
        let header = |text| caller(trusted, "10.0.0.1:5", &[(XFF, text)]);
        assert_eq!(header("1.1.1.1, 203.0.113.9, 192.0.2.7"), "/203.0.113.9");
        assert_eq!(header("x\x09y, 203.0.113.9"), "/203.0.113.9");
        assert_eq!(header("unknown"), "/10.0.0.1:5");
        assert_eq!(header("1.1.1.1, nonsense, 192.0.2.7"), "/192.0.2.7");
        assert_eq!(header("[2001:db8::2]:80"), "/2001:db8::2");
        assert_eq!(header("203.0.113.9:80"), "/203.0.113.9");
        let several = [(XFF, "1.1.1.1"), (XFF, "203.0.113.9")];
        assert_eq!(caller(trusted, "10.0.0.1:5", &several), "/203.0.113.9");
        for (header, expected) in [
            (
                "for=203.0.113.9;proto=http, For=\"[::1]:4711\"",
                "/203.0.113.9",
            ),
            ("for=_hidden", "/10.0.0.1:5"),
            ("proto=https", "/10.0.0.1:5"),
        ] {
            let named = caller(trusted, "10.0.0.1:5", &[("forwarded", header)]);
            assert_eq!(named, expected, "{header}");
        }
    }

    #[test]
    fn a_setting_that_names_no_network_is_refused() {
        for wrong in ["10.0.0.0/33", "proxy.example", "10.0.0.1-10.0.0.9"] {
            assert!(Proxies::parse(wrong).unwrap_err().contains(wrong));
        }
        assert!(Proxies::parse("unix, 10.1.2.3, ::1/128,").unwrap().unix);
    }
}
