use actix_web::test::TestRequest;
use bytes::BytesMut;

use super::*;

fn decoded(coding: Coding, body: &[u8], limit: usize) -> Result<Bytes, RestError> {
    let taken = Taken::none(&crate::budget::BodyMemory::new(None));
    let into = Growing::new(taken, 0, limit).unwrap();
    Ok(coding.decoded(body, into, limit)?.bytes)
}

fn accepts(values: &[&str]) -> Option<&'static str> {
    let mut headers = HeaderMap::new();
    for value in values {
        headers.append(ACCEPT_ENCODING, HeaderValue::from_str(value).unwrap());
    }
    accepted(&headers).map(Coding::name)
}

#[test]
fn every_coding_gives_back_what_it_was_given() {
    let noise: Vec<u8> = (0..100_000_u32)
        .map(|at| (at.wrapping_mul(at) >> 7) as u8)
        .collect();
    for coding in Coding::ALL {
        for body in [&b"x"[..], &b"abc".repeat(30_000), &noise] {
            let encoded = coding.encoded(body).unwrap();
            let given = decoded(coding, &encoded, body.len()).unwrap();
            assert!(given == body, "{coding:?}");
        }
    }
}

#[test]
fn the_limit_counts_decompressed_bytes() {
    let body = vec![0_u8; 1 << 20];
    for coding in Coding::ALL {
        let bomb = coding.encoded(&body).unwrap();
        assert!(bomb.len() < 5000, "{coding:?}: {}", bomb.len());
        let limit = body.len() - 1;
        let error = decoded(coding, &bomb, limit).unwrap_err();
        assert!(matches!(error, RestError::TooLarge { .. }), "{coding:?}");
    }
}

#[test]
fn damaged_bodies_are_told() {
    let text = b"a body of some length, long enough to be cut in two ".repeat(50);
    for coding in Coding::ALL {
        let whole = coding.encoded(&text).unwrap();
        let half = &whole[..whole.len() / 2];
        let last_missing = &whole[..whole.len() - 1];
        for damaged in [half, last_missing, b"no such thing", b"\x00", &[0xff; 100]] {
            let error = decoded(coding, damaged, 1 << 20).unwrap_err();
            assert!(
                matches!(error, RestError::BadCoding { .. }),
                "{coding:?} {damaged:?}: {error}"
            );
        }
    }
}

#[test]
fn a_frame_that_asks_for_much_memory_is_refused() {
    // A frame of zstd with a window of 128 MiB and one empty block.
    let frame = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 17 << 3, 0x01, 0x00, 0x00];
    let error = decoded(Coding::Zstd, &frame, 1 << 20).unwrap_err();
    assert!(matches!(error, RestError::BadCoding { .. }), "{error}");
}

#[test]
fn deflate_comes_with_and_without_its_frame() {
    let mut encoder =
        flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(b"plain").unwrap();
    let raw = encoder.finish().unwrap();
    assert_eq!(decoded(Coding::Deflate, &raw, 100).unwrap(), "plain");
}

#[test]
fn codings_of_a_body_are_known_and_alone() {
    let of = |value: &'static str| {
        let request = TestRequest::post().insert_header((CONTENT_ENCODING, value));
        Coding::of_body(&request.to_http_request())
    };
    assert_eq!(of("GZip").unwrap(), Some(Coding::Gzip));
    assert_eq!(of("x-gzip").unwrap(), Some(Coding::Gzip));
    assert_eq!(of("identity").unwrap(), None);
    assert_eq!(of("identity, br").unwrap(), Some(Coding::Brotli));
    for other in ["lzma", "gzip, gzip", "br, zstd"] {
        let error = of(other).unwrap_err();
        assert!(matches!(error, RestError::UnknownCoding { .. }), "{other}");
    }
}

#[test]
fn the_client_decides_how_its_answer_is_compressed() {
    assert_eq!(accepts(&[]), None);
    assert_eq!(accepts(&["gzip, deflate, br, zstd"]), Some("zstd"));
    assert_eq!(accepts(&["gzip, deflate"]), Some("gzip"));
    assert_eq!(accepts(&["br;q=0.5, GZIP ; q=0.8"]), Some("gzip"));
    assert_eq!(accepts(&["gzip", "br;q=0"]), Some("gzip"));
    assert_eq!(accepts(&["*"]), Some("zstd"));
    assert_eq!(accepts(&["*;q=0.1, zstd;q=0"]), Some("br"));
    assert_eq!(accepts(&["identity, gzip;q=0.5"]), None);
    for none in ["", "identity", "gzip;q=0", "*;q=0", "lzma", "gzip;q=x"] {
        assert_eq!(accepts(&[none]), None, "{none:?}");
    }
}

#[test]
fn text_is_compressed_and_what_is_compressed_is_not() {
    let with = |kind: &str| {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_str(kind).unwrap());
        is_compressible(&headers, b"x")
    };
    for kind in [
        "text/plain; charset=utf-8",
        "Application/JSON",
        "application/problem+json",
    ] {
        assert!(with(kind), "{kind}");
    }
    for kind in [
        "image/png",
        "application/zip",
        "text/event-stream",
        "video/mp4",
        "",
    ] {
        assert!(!with(kind), "{kind}");
    }
    let bare = |body: &[u8]| is_compressible(&HeaderMap::new(), body);
    assert!(bare(b"{\n  \"a\": 1\n}"));
    assert!(bare(&"\u{5317}".repeat(600).into_bytes()));
    assert!(!bare(b"\x89PNG\r\n\x1a\n\0"));
    assert!(!bare(&[0xff; 10]));
    assert!(!bare(b"\0\0\0"));
}

#[actix_web::test]
async fn small_bodies_and_those_with_a_coding_go_as_they_are() {
    let request = TestRequest::get()
        .insert_header((ACCEPT_ENCODING, "gzip"))
        .to_http_request();
    let text = BytesMut::from(&b"text ".repeat(1000)[..]).freeze();
    let answer = |body: &Bytes| {
        HttpResponse::Ok()
            .content_type("text/plain")
            .body(body.clone())
    };
    let header = |response: &HttpResponse, name: HeaderName| {
        let value = response.headers().get(name);
        value.map(|value| value.to_str().unwrap().to_owned())
    };

    let response = compressed(&request, answer(&text), 1024).await;
    assert_eq!(header(&response, CONTENT_ENCODING).unwrap(), "gzip");
    assert_eq!(header(&response, VARY).unwrap(), "accept-encoding");

    for (min_bytes, body) in [(0, &text), (1024, &text.slice(..1023))] {
        let response = compressed(&request, answer(body), min_bytes).await;
        assert_eq!(header(&response, CONTENT_ENCODING), None);
        assert_eq!(header(&response, VARY), None);
    }

    let mut own = answer(&text);
    own.headers_mut()
        .insert(CONTENT_ENCODING, HeaderValue::from_static("br"));
    let response = compressed(&request, own, 1024).await;
    assert_eq!(header(&response, CONTENT_ENCODING).unwrap(), "br");
    assert_eq!(response.into_body().try_into_bytes().unwrap(), text);

    let plain = TestRequest::get().to_http_request();
    let mut response = answer(&text);
    response
        .headers_mut()
        .insert(VARY, HeaderValue::from_static("Origin"));
    let response = compressed(&plain, response, 1024).await;
    assert_eq!(header(&response, CONTENT_ENCODING), None);
    assert_eq!(header(&response, VARY).unwrap(), "Origin, accept-encoding");
}
