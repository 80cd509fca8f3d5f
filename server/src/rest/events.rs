//! Replies in parts as Server-Sent Events, for clients that ask for them.
//!
//! | the handler's part | the event |
//! |---|---|
//! | text | its lines as `data:` |
//! | other bytes | `event: base64`, the bytes in base64 |
//! | none | none |
//! | a failure after the first part | `event: error`, the error body in one line of JSON; the last one |
//! | its end | `event: end`, `data: [DONE]` |
//!
//! Browsers connect again when a stream just ends, and clients of `OpenAI`'s API wait for `[DONE]`:
//! the last event tells both that all is said.

use std::convert::Infallible;
use std::future::ready;

use actix_web::HttpRequest;
use actix_web::http::header::ACCEPT;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, stream};
use ts_serving::ServingError;

use super::{RestError, coding, respond};

/// The type of such a body.
pub(crate) const MEDIA_TYPE: &str = "text/event-stream";

const END: Bytes = Bytes::from_static(b"event: end\ndata: [DONE]\n\n");

/// What a client said of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// It named other types, or none.
    No,
    /// It takes them, and something else too: a reply that comes at once needs no events.
    ForParts,
    /// It takes nothing else.
    Always,
}

impl Wanted {
    /// As its `Accept` says. Anything (`*/*`) is not a wish.
    pub(crate) fn by(request: &HttpRequest) -> Self {
        let mut events = false;
        let mut others = false;
        for value in request.headers().get_all(ACCEPT) {
            let value = String::from_utf8_lossy(value.as_bytes());
            for item in value.split(',') {
                let (kind, weight) = coding::weighted(item);
                if weight > 0.0 {
                    let is_events = kind.eq_ignore_ascii_case(MEDIA_TYPE);
                    events |= is_events;
                    others |= !is_events;
                }
            }
        }
        match (events, others) {
            (false, _) => Self::No,
            (true, true) => Self::ForParts,
            (true, false) => Self::Always,
        }
    }
}

/// The events of a reply. An error, which is the last part if there is one, is told and not passed
/// on: the body is whole, and says that the reply is not.
pub(crate) fn events(
    parts: impl Stream<Item = Result<Bytes, ServingError>>,
) -> impl Stream<Item = Result<Bytes, Infallible>> {
    parts
        .map(Some)
        .chain(stream::once(ready(None)))
        .scan(false, |failed, part| {
            ready(match part {
                Some(Ok(part)) => Some(Ok(event_of(&part))),
                Some(Err(error)) => {
                    *failed = true;
                    Some(Ok(failure(error)))
                }
                None => (!*failed).then_some(Ok(END)),
            })
        })
}

/// One part.
pub(crate) fn event_of(part: &[u8]) -> Bytes {
    if part.is_empty() {
        return Bytes::new();
    }
    let mut event = Vec::with_capacity(part.len() + 16);
    match std::str::from_utf8(part) {
        Ok(text) => {
            // Each of the three ways to end a line ends one here too, or a part could begin fields
            // of its own.
            for line in text.replace("\r\n", "\n").split(['\r', '\n']) {
                data(&mut event, line);
            }
        }
        Err(_) => {
            event.extend_from_slice(b"event: base64\n");
            data(&mut event, &BASE64_STANDARD.encode(part));
        }
    }
    event.push(b'\n');
    Bytes::from(event)
}

fn data(event: &mut Vec<u8>, line: &str) {
    event.extend_from_slice(b"data: ");
    event.extend_from_slice(line.as_bytes());
    event.push(b'\n');
}

fn failure(error: ServingError) -> Bytes {
    let mut event = b"event: error\n".to_vec();
    data(&mut event, &respond::error_line(&RestError::Serving(error)));
    event.push(b'\n');
    Bytes::from(event)
}

#[cfg(test)]
mod tests {
    use actix_web::test::TestRequest;

    use super::*;

    fn text(part: &[u8]) -> String {
        String::from_utf8(event_of(part).to_vec()).unwrap()
    }

    #[test]
    fn a_part_is_one_event_whatever_is_in_it() {
        assert_eq!(text(b"hello"), "data: hello\n\n");
        assert_eq!(text(b" a\n"), "data:  a\ndata: \n\n");
        assert_eq!(
            text(b"a\nb\r\nc\rd\n\r\ne"),
            "data: a\ndata: b\ndata: c\ndata: d\ndata: \ndata: e\n\n"
        );
        assert_eq!(
            text(b"x\n\nevent: end\n"),
            "data: x\ndata: \ndata: event: end\ndata: \n\n"
        );
        assert_eq!(
            text("\u{5317}\u{2028}".as_bytes()),
            "data: \u{5317}\u{2028}\n\n"
        );
        assert_eq!(text(b"\xff\x00"), "event: base64\ndata: /wA=\n\n");
        assert_eq!(text(b""), "");
    }

    #[actix_web::test]
    async fn the_last_event_tells_how_it_ended() {
        let all = async |parts: Vec<Result<Bytes, ServingError>>| {
            let events = events(stream::iter(parts)).map(|event| match event {
                Ok(event) => String::from_utf8(event.to_vec()).unwrap(),
            });
            events.collect::<String>().await
        };
        let whole = all(vec![Ok(Bytes::from_static(b"a")), Ok(Bytes::new())]).await;
        assert_eq!(whole, "data: a\n\nevent: end\ndata: [DONE]\n\n");
        let died = ServingError::WorkerDied {
            out_of_memory: false,
        };
        let broken = all(vec![Ok(Bytes::from_static(b"a")), Err(died)]).await;
        assert_eq!(
            broken,
            "data: a\n\nevent: error\ndata: {\"code\":500,\"type\":\"InternalServerException\",\
             \"message\":\"Worker died.\"}\n\n"
        );
    }

    #[test]
    fn only_who_asks_gets_events() {
        let wanted = |accept: &'static str| {
            let request = TestRequest::get().insert_header((ACCEPT, accept));
            Wanted::by(&request.to_http_request())
        };
        assert_eq!(wanted("text/event-stream"), Wanted::Always);
        assert_eq!(wanted("Text/Event-Stream; q=0.5"), Wanted::Always);
        assert_eq!(
            wanted("application/json, text/event-stream"),
            Wanted::ForParts
        );
        for other in ["*/*", "text/*", "text/event-stream;q=0", "", "text/html"] {
            assert_eq!(wanted(other), Wanted::No, "{other:?}");
        }
        let none = TestRequest::get().to_http_request();
        assert_eq!(Wanted::by(&none), Wanted::No);
    }
}
