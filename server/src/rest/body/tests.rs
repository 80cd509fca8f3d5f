use actix_web::FromRequest as _;
use actix_web::test::TestRequest;

use super::*;

const LIMITS: Limits = Limits {
    bytes: 100,
    parts: 3,
};

fn received(bytes: Bytes) -> Received {
    let taken = Taken::none(&BodyMemory::new(None));
    Received { bytes, taken }
}

fn split(content_type: &str, body: &str) -> Result<Vec<(String, String, String)>, RestError> {
    let body = received(body.to_owned().into());
    let parts =
        futures_util::FutureExt::now_or_never(parts(content_type, body, LIMITS)).unwrap()?;
    let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).unwrap();
    Ok(parts
        .iter()
        .map(|p| (p.name.clone(), p.content_type.clone(), text(&p.value)))
        .collect())
}

fn part(name: &str, content_type: &str, value: &str) -> (String, String, String) {
    (name.to_owned(), content_type.to_owned(), value.to_owned())
}

fn form(fields: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for (head, value) in fields {
        text += &format!("--b\r\nContent-Disposition: form-data; {head}\r\n\r\n{value}\r\n");
    }
    text + "--b--\r\n"
}

#[test]
fn what_is_no_form_is_one_field() {
    for content_type in ["", "application/json; charset=utf-8", "text/plain"] {
        assert_eq!(
            split(content_type, "{}").unwrap(),
            [part("body", content_type, "{}")]
        );
    }
}

#[test]
fn a_urlencoded_form_is_decoded_and_untyped() {
    let content_type = "Application/X-WWW-Form-Urlencoded; charset=UTF-8";
    let fields = split(content_type, "data=a%20b+c&empty=&data=last").unwrap();
    assert_eq!(fields, [part("data", "", "last"), part("empty", "", "")]);
}

#[test]
fn files_have_a_type_and_plain_fields_have_none() {
    let body = form(&[
        (r#"name="file"; filename="../../x.png""#, "1"),
        (
            "name=\"json\"; filename=\"a\"\r\nContent-Type: application/json",
            "{}",
        ),
        ("name=\"plain\"\r\nContent-Type: text/plain", "x"),
    ]);
    let expected = [
        part("file", "application/octet-stream", "1"),
        part("json", "application/json", "{}"),
        part("plain", "", "x"),
    ];
    assert_eq!(
        split("multipart/form-data; boundary=b", &body).unwrap(),
        expected
    );
    let extended = "name=f; FileName*=UTF-8''%e2%82%ac\r\nContent-Type: application/json";
    let fields = split(
        "multipart/form-data; boundary=b",
        &form(&[(extended, "[]")]),
    );
    assert_eq!(fields.unwrap(), [part("f", "application/json", "[]")]);
}

#[test]
fn of_fields_with_one_name_the_last_counts() {
    let body = form(&[("name=a", "1"), ("name=b", "2"), ("name=a", "3")]);
    let fields = split("multipart/form-data; boundary=b", &body).unwrap();
    assert_eq!(fields, [part("a", "", "3"), part("b", "", "2")]);
}

#[test]
fn forms_that_cannot_be_read_are_refused() {
    let nameless = form(&[(r#"filename="x""#, "1")]);
    let cases = [
        ("multipart/form-data", "x"),
        ("multipart/form-data; boundary=b", "no boundary"),
        (
            "multipart/form-data; boundary=b",
            "--b\r\nContent-Disposition: form-data; name=a\r\n\r\n1",
        ),
        ("multipart/form-data; boundary=b", &nameless),
    ];
    for (content_type, body) in cases {
        let error = split(content_type, body).unwrap_err();
        assert!(
            matches!(error, RestError::BadForm { .. }),
            "{body}: {error:?}"
        );
    }
}

#[test]
fn more_fields_than_allowed_are_refused() {
    let error = split("application/x-www-form-urlencoded", "a=&b=&c=&d=").unwrap_err();
    assert!(
        matches!(error, RestError::TooManyParts { limit: 3 }),
        "{error:?}"
    );
}

async fn collected(request: TestRequest) -> Result<Bytes, RestError> {
    let (request, mut payload) = request.to_http_parts();
    let payload = web::Payload::from_request(&request, &mut payload)
        .await
        .unwrap();
    let body = collect(&request, payload, &Intake::alone(LIMITS)).await?;
    Ok(body.bytes)
}

#[actix_web::test]
async fn the_limit_holds_for_what_arrives_and_for_what_is_announced() {
    let exact = collected(TestRequest::post().set_payload(vec![1; 100])).await;
    assert_eq!(exact.unwrap().len(), 100);
    let over = TestRequest::post().set_payload(vec![1; 101]);
    assert!(matches!(
        collected(over).await,
        Err(RestError::TooLarge { limit: 100 })
    ));
    for announced in ["101", "3221225472", "99999999999999999999", "-1"] {
        let request = TestRequest::post().insert_header((CONTENT_LENGTH, announced));
        assert!(
            matches!(collected(request).await, Err(RestError::TooLarge { .. })),
            "{announced}"
        );
    }
    assert!(collected(TestRequest::get()).await.unwrap().is_empty());
}

proptest::proptest! {
    #[test]
    fn any_bytes_are_split_or_refused(body: Vec<u8>, form: bool, boundary in "[a-z]{1,3}") {
        let content_type = if form {
            format!("multipart/form-data; boundary={boundary}")
        } else {
            "application/x-www-form-urlencoded".to_owned()
        };
        let outcome = futures_util::FutureExt::now_or_never(parts(&content_type, received(body.into()), LIMITS));
        let outcome = outcome.expect("everything is there, so nothing is waited for");
        proptest::prop_assert!(outcome.map_or(true, |parts| parts.len() <= LIMITS.parts));
    }
}
