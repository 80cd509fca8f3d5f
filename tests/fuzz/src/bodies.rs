//! Bodies that become fields. An input is the size of the pieces that a body arrives in, the rest of
//! its content type, a line feed, and the body.

use std::sync::LazyLock;

use bytes::Bytes;
use tokio::runtime::{Builder, Runtime};
use ts_server::fuzzing;

/// Bytes and fields that a body may have.
const LIMITS: (usize, usize) = (2048, 8);

/// What time-outs run on.
static CLOCK: LazyLock<Runtime> = LazyLock::new(|| {
    let clock = Builder::new_current_thread().enable_time().build();
    clock.expect("a runtime without threads needs next to nothing")
});

/// A form of `multipart/form-data`.
pub fn multipart(data: &[u8]) {
    check("multipart/form-data", data);
}

/// A form of `application/x-www-form-urlencoded`.
pub fn form(data: &[u8]) {
    check("application/x-www-form-urlencoded", data);
}

/// A body in pieces is the same as in one, and within the limits.
fn check(essence: &str, data: &[u8]) {
    let Some((&size, data)) = data.split_first() else {
        return;
    };
    let Some(end) = data.iter().position(|byte| *byte == b'\n') else {
        return;
    };
    let Ok(rest) = std::str::from_utf8(&data[..end]) else {
        return;
    };
    let content_type = format!("{essence}{rest}");
    let body = &data[end + 1..];
    let read = |size: usize| {
        let pieces = body.chunks(size.max(1)).map(Bytes::copy_from_slice);
        fuzzing::body(&CLOCK, &content_type, pieces.collect(), LIMITS)
    };
    let fields = read(usize::from(size));
    assert_eq!(fields, read(body.len()), "in pieces it is another body");
    let Ok(fields) = fields else { return };
    assert!(body.len() <= LIMITS.0, "{} bytes", body.len());
    assert!(fields.len() <= LIMITS.1, "{} fields", fields.len());
    for (index, field) in fields.iter().enumerate() {
        let again = fields[..index].iter().any(|it| it.name == field.name);
        assert!(!again, "`{}` is there twice", field.name);
    }
}
