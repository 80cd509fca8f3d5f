//! What may stand in which file: `unsafe`, failure statuses, metrics, unfinished work.

use ts_house::{SourceFile, Token, assert_none, files, tokens};

/// Where `unsafe` may stand, and what for. Each site still has to say why it is sound.
const UNSAFE_ALLOWED: &[&str] = &[
    // The languages meet here.
    "crates/plugin/",
    // Memory shared between the server and a model host.
    "crates/wire/src/shared.rs",
    // Opening the plugin's library and calling its one function.
    "crates/host/src/plugin.rs",
];

/// The failure statuses by the names actix gives them, as a constant and as a response.
const FAILURE_STATUSES: &[(&str, &str)] = &[
    ("BAD_REQUEST", "BadRequest"),
    ("UNAUTHORIZED", "Unauthorized"),
    ("FORBIDDEN", "Forbidden"),
    ("NOT_FOUND", "NotFound"),
    ("METHOD_NOT_ALLOWED", "MethodNotAllowed"),
    ("REQUEST_TIMEOUT", "RequestTimeout"),
    ("CONFLICT", "Conflict"),
    ("PAYLOAD_TOO_LARGE", "PayloadTooLarge"),
    ("UNSUPPORTED_MEDIA_TYPE", "UnsupportedMediaType"),
    ("TOO_MANY_REQUESTS", "TooManyRequests"),
    ("INTERNAL_SERVER_ERROR", "InternalServerError"),
    ("NOT_IMPLEMENTED", "NotImplemented"),
    ("SERVICE_UNAVAILABLE", "ServiceUnavailable"),
    ("GATEWAY_TIMEOUT", "GatewayTimeout"),
    ("INSUFFICIENT_STORAGE", "InsufficientStorage"),
];

fn rust_files() -> Vec<SourceFile> {
    let found = files(&[".rs"]);
    assert!(
        found.len() > 10,
        "only {} Rust files were found",
        found.len()
    );
    found
}

fn is_test_code(path: &str) -> bool {
    path.starts_with("tests/") || path.contains("/tests/") || path.ends_with("/tests.rs")
}

/// Whether the `unsafe` at `index` belongs to a type, such as `unsafe extern "C" fn(…)`: it claims
/// nothing, the value of that type does.
fn is_function_pointer_type(tokens: &[Token], index: usize) -> bool {
    let mut after = tokens[index + 1..].iter().map(|token| token.text.as_str());
    match after.next() {
        Some("fn") => after.next() == Some("("),
        Some("extern") => {
            let named = after.find(|text| !text.starts_with('"'));
            named == Some("fn") && after.next() == Some("(")
        }
        _ => false,
    }
}

/// Whether the statement that `line` (counted from 1) is part of has a comment on its soundness
/// right above it.
fn says_why_it_is_sound(text: &str, line: usize) -> bool {
    let above: Vec<&str> = text.lines().take(line).map(str::trim).collect();
    for (distance, current) in above.iter().rev().enumerate() {
        if current.contains("SAFETY:") || current.contains("# Safety") {
            return true;
        }
        let comment = current.starts_with("//");
        let another_statement = current.is_empty() || current.ends_with([';', '{', '}']);
        if distance > 0 && !comment && another_statement {
            return false;
        }
    }
    false
}

#[test]
fn unsafe_stands_where_it_may_and_says_why() {
    let mut breaches = Vec::new();
    for file in rust_files() {
        let tokens = tokens(&file);
        for (index, token) in tokens.iter().enumerate() {
            if token.text != "unsafe" || is_function_pointer_type(&tokens, index) {
                continue;
            }
            let place = format!("{}:{}", file.path, token.line);
            if !UNSAFE_ALLOWED
                .iter()
                .any(|allowed| file.path.starts_with(allowed))
            {
                breaches.push(format!(
                    "{place}: `unsafe` outside the files that may have it"
                ));
            } else if !says_why_it_is_sound(&file.text, token.line) {
                breaches.push(format!(
                    "{place}: `unsafe` without a SAFETY comment above it"
                ));
            }
        }
    }
    assert_none(
        &breaches,
        "Write `// SAFETY: …` right above the statement: who guarantees what. Elsewhere find a safe \
         way (rustix, bytes), or move the code to the plugin.",
    );
}

#[test]
fn a_site_is_judged_by_the_comment_of_its_own_statement() {
    let with = "// SAFETY: the map is ours.\n#[expect(unsafe_code)]\nlet a =\n    unsafe { f() };";
    assert!(says_why_it_is_sound(with, 4));
    let anothers = "// SAFETY: the map is ours.\nlet a = unsafe { f() };\nlet b = unsafe { g() };";
    assert!(!says_why_it_is_sound(anothers, 3));
    assert!(!says_why_it_is_sound("let a = unsafe { f() };", 1));
}

#[test]
fn only_status_rs_names_failure_statuses() {
    let mut breaches = Vec::new();
    for file in rust_files() {
        let edge = file.path.starts_with("server/src/") || file.path.starts_with("crates/");
        if !edge || file.path == "server/src/status.rs" || is_test_code(&file.path) {
            continue;
        }
        let mut tokens = tokens(&file);
        // Unit tests at the end of a file may say what they expect.
        if let Some(tests) = tokens
            .windows(3)
            .position(|w| w[0].text == "cfg" && w[1].text == "(" && w[2].text == "test")
        {
            tokens.truncate(tests);
        }
        for window in tokens.windows(5) {
            let [owner, colon, second, name, open] = window else {
                continue;
            };
            if colon.text != ":" || second.text != ":" {
                continue;
            }
            let named = FAILURE_STATUSES.iter().any(|(constant, response)| {
                owner.text == "StatusCode" && name.text == *constant
                    || owner.text == "HttpResponse" && name.text == *response && open.text == "("
            });
            if named {
                let line = name.line;
                breaches.push(format!(
                    "{}:{line}: {}::{}",
                    file.path, owner.text, name.text
                ));
            }
        }
    }
    assert_none(
        &breaches,
        "Return an error with its class (ts_types::Classify); server/src/status.rs alone turns \
         classes into the numbers of each dialect.",
    );
}

#[test]
fn metrics_are_named_in_one_table() {
    let mut breaches = Vec::new();
    for file in rust_files() {
        if file.path == "crates/metrics/src/names.rs" || is_test_code(&file.path) {
            continue;
        }
        for window in tokens(&file).windows(2) {
            let [name, next] = window else { continue };
            if name.text == "Builtin" && next.text == "{" {
                breaches.push(format!("{}:{}", file.path, name.line));
            }
        }
    }
    assert_none(
        &breaches,
        "Every metric of the server stands in crates/metrics/src/names.rs: declare it there and \
         hand its handle down.",
    );
}

#[test]
fn nothing_is_left_unfinished() {
    let marks = [
        ["TO", "DO"].concat(),
        ["FIX", "ME"].concat(),
        ["XX", "X"].concat(),
    ];
    let mut breaches = Vec::new();
    for file in files(&[".rs", ".py", ".sh", ".toml", ".md", "Makefile", "run"]) {
        for (index, line) in file.text.lines().enumerate() {
            let words = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            if words
                .into_iter()
                .any(|word| marks.iter().any(|mark| word == mark))
            {
                breaches.push(format!("{}:{}: {}", file.path, index + 1, line.trim()));
            }
            if file.path.ends_with(".rs") && line.trim_start().starts_with("#[ignore") {
                breaches.push(format!(
                    "{}:{}: a test that does not run",
                    file.path,
                    index + 1
                ));
            }
        }
    }
    assert_none(
        &breaches,
        "Finish it, or file an issue and say in the code what holds today.",
    );
}

/// Fault kind K2: what a request names is never joined to a path by who decodes it. The core takes
/// names and URLs as types, and its store alone turns them into files.
#[test]
fn who_decodes_requests_touches_no_files() {
    const OF_FILES: &[&str] = &[
        "fs_err",
        "Path",
        "PathBuf",
        "File",
        "OpenOptions",
        "Command",
    ];
    let mut breaches = Vec::new();
    let mut seen = 0;
    for file in rust_files() {
        if !file.path.starts_with("server/src/rest/") || is_test_code(&file.path) {
            continue;
        }
        seen += 1;
        for token in tokens(&file) {
            if OF_FILES.contains(&token.text.as_str()) {
                breaches.push(format!("{}:{}: {}", file.path, token.line, token.text));
            }
        }
    }
    assert!(seen > 10, "only {seen} files were looked at");
    assert_none(
        &breaches,
        "Parse the text into a type of ts_types and hand that to ts_serving.",
    );
}

/// Fault kind K2: there is one way to an endpoint, past the guard, and every route says what it does.
#[test]
fn every_request_passes_the_guard() {
    let sequence = |file: &SourceFile, wanted: &[&str]| -> Vec<usize> {
        let tokens = tokens(file);
        let windows = tokens.windows(wanted.len()).enumerate();
        let found = windows.filter(|(_, window)| {
            let mut pairs = window.iter().zip(wanted);
            pairs.all(|(token, text)| token.text == *text)
        });
        found.map(|(index, _)| index).collect()
    };
    let mut entries = 0;
    for file in rust_files() {
        if !file.path.starts_with("server/src/") || is_test_code(&file.path) {
            continue;
        }
        let calls = sequence(&file, &["torchserve", ":", ":", "answer", "("]);
        if let [call] = calls[..] {
            let guard = sequence(&file, &["guard", ".", "check", "("]);
            assert!(
                guard.first().is_some_and(|guard| *guard < call),
                "{}: an endpoint is called before the guard was asked",
                file.path
            );
        }
        entries += calls.len();
        if file.path.ends_with("/rest/routes.rs") {
            let text = &file.text;
            let (_, action) = text
                .split_once("fn action(&self) -> Action")
                .unwrap_or_default();
            let (action, _) = action.split_once("\n    }\n").unwrap_or_default();
            assert!(
                action.contains("Action::ChangeModels"),
                "the table of actions is not found"
            );
            assert!(
                !action.contains("_ =>"),
                "{}: a new route would get an action that nobody chose",
                file.path
            );
        }
    }
    assert_eq!(entries, 1, "ways to the endpoints");
}
