//! The head of an HTTP/1.1 reply, as far as a load generator has to understand it.

/// What the head of a reply says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    /// The status.
    pub(crate) status: u16,
    /// Bytes of the head itself, its blank line included.
    pub(crate) length: usize,
    /// Bytes of the body that follows.
    pub(crate) body_length: usize,
    /// The server ends the connection after this reply.
    pub(crate) closes: bool,
}

impl Head {
    /// Reads a head; `None` as long as it is not complete.
    ///
    /// # Errors
    /// When it is no head, or one of a body without a known length, which no server that is
    /// measured here sends.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Option<Self>, String> {
        let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else {
            return Ok(None);
        };
        let text = std::str::from_utf8(&bytes[..end])
            .map_err(|_| "the head of a reply is not UTF-8 text".to_owned())?;
        let mut lines = text.split("\r\n");
        let first = lines.next().unwrap_or_default();
        let status = first
            .strip_prefix("HTTP/1.1 ")
            .and_then(|rest| rest.get(..3))
            .and_then(|status| status.parse().ok())
            .ok_or_else(|| format!("`{first}` is no HTTP/1.1 status line"))?;
        let mut body_length = None;
        let mut closes = false;
        for (name, value) in lines.filter_map(|line| line.split_once(':')) {
            if name.eq_ignore_ascii_case("content-length") {
                body_length = value.trim().parse().ok();
            } else if name.eq_ignore_ascii_case("connection") {
                closes = value.trim().eq_ignore_ascii_case("close");
            }
        }
        let body_length =
            body_length.ok_or_else(|| format!("a reply with status {status} has no length"))?;
        Ok(Some(Self {
            status,
            length: end + 4,
            body_length,
            closes,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_read_when_it_is_complete() {
        let text = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\ndate: now\r\n\r\nhello";
        let head = Head {
            status: 200,
            length: text.len() - 5,
            body_length: 12,
            closes: false,
        };
        assert_eq!(Head::parse(text), Ok(Some(head)));
        for end in 0..head.length {
            assert_eq!(Head::parse(&text[..end]), Ok(None), "{end}");
        }
    }

    #[test]
    fn a_reply_that_ends_the_connection_is_known() {
        let text =
            b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        let head = Head::parse(text).unwrap().unwrap();
        assert!(head.closes);
        assert_eq!(head.status, 503);
    }

    #[test]
    fn what_cannot_be_counted_is_an_error() {
        for text in [
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
            "HTTP/1.1 2x0 OK\r\ncontent-length: 1\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: one\r\n\r\n",
            "SSH-2.0\r\n\r\n",
        ] {
            assert!(Head::parse(text.as_bytes()).is_err(), "{text}");
        }
    }
}
