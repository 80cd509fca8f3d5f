//! Bodies: forms, JSON of every dialect, framing that lies.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use ts_test::Running;

use super::{CLIENTS, Dice, Holdings, Statuses, at_once, resident, serves};

const BODIES: usize = 10_000;

/// How long any answer may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// In place of a status, where the framing ends before there is a request to answer.
const NO_ANSWER: u16 = 0;

/// A request that is as it should be; its body is what is broken.
struct Whole {
    kind: &'static str,
    path: &'static str,
    content_type: &'static str,
    body: &'static str,
    words: &'static [&'static str],
}

const JSON: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    "null",
    "-1",
    "1e999",
    "\"",
    ",",
    ":",
    "\\ud800",
    "99999999999999999999",
    "true",
    "{\"a\":",
    "/*",
    "'",
];

const WHOLE: &[Whole] = &[
    Whole {
        kind: "multipart",
        path: "/predictions/m",
        content_type: "multipart/form-data; boundary=edge",
        body: "--edge\r\nContent-Disposition: form-data; name=\"data\"; filename=\"a.png\"\r\n\
               Content-Type: image/png\r\n\r\n\u{1}\u{2}pixels\r\n--edge\r\n\
               Content-Disposition: form-data; name=\"more\"\r\n\r\ntext\r\n--edge--\r\n",
        words: &[
            "--edge",
            "--edge--",
            "\r\n\r\n",
            "\r\n",
            "name=",
            "; filename=\"../x\"",
            "\"",
        ],
    },
    Whole {
        kind: "form",
        path: "/predictions/m",
        content_type: "application/x-www-form-urlencoded",
        body: "data=a%20b+c&empty=&again=1&again=2&%c3%bc=%ff",
        words: &["%", "%00", "&", "=", "&&&&", "%f"],
    },
    Whole {
        kind: "v1",
        path: "/v1/models/m:predict",
        content_type: "application/json",
        body: r#"{"instances": [[1, 2.5], {"b64": "aGk="}, "text", null], "id": 7}"#,
        words: JSON,
    },
    Whole {
        kind: "v2",
        path: "/v2/models/m/infer",
        content_type: "application/json",
        body: r#"{"id": "x", "inputs": [{"name": "in", "shape": [2, -1], "datatype": "FP32",
                  "data": [1, 2, 3, 4]}, {"name": "b", "shape": [0, 3], "datatype": "BYTES",
                  "data": []}], "outputs": [{"name": "out"}]}"#,
        words: JSON,
    },
    Whole {
        kind: "registration",
        path: "/models",
        content_type: "application/json",
        // There is no such archive, whatever becomes of the rest.
        body: r#"{"url": "lost.mar", "model_name": "n", "initial_workers": 1, "batch_size": 4,
                  "synchronous": true, "runtime": "python", "handler": "h.py"}"#,
        words: JSON,
    },
];

/// Content types that are none, or not that of the body.
const CONTENT_TYPES: &[&str] = &[
    "",
    ";",
    "multipart/form-data",
    "multipart/form-data; boundary=",
    "multipart/form-data; boundary=\"",
    "multipart/form-data; boundary=other",
    "multipart/mixed; boundary=edge",
    "MULTIPART/FORM-DATA; BOUNDARY=edge",
    "application/x-www-form-urlencoded; charset=utf-16",
    "application/json, text/plain",
    "text/\u{e9}",
    "*/*",
    "////",
];

/// Heads of requests whose framing is wrong, up to the name of their path; a body comes after.
const FRAMING: &[&str] = &[
    "content-length: 5\r\ncontent-length: 6\r\n",
    "content-length: -1\r\n",
    "content-length: +5\r\n",
    "content-length: 0x5\r\n",
    "content-length: 5, 5\r\n",
    "content-length: 18446744073709551616\r\n",
    "content-length: 9999999999\r\n",
    "content-length: 100\r\n",
    "content-length: 3\r\n",
    "content-length: 5\r\ntransfer-encoding: chunked\r\n",
    "transfer-encoding: gzip\r\n",
    "transfer-encoding: chunked, gzip\r\n",
    "transfer-encoding: identity\r\n",
    "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
    "transfer-encoding : chunked\r\n",
    "transfer-encoding: xchunked\r\n",
    "content-type: text/\u{1}\r\ncontent-length: 5\r\n",
    "content-type text\r\n",
];

/// What chunks may look like; what is sent is one of these, broken.
const CHUNKS: &[&str] = &[
    "5\r\nhello\r\n0\r\n\r\n",
    "5;ext=1\r\nhello\r\n0\r\nx: y\r\n\r\n",
    "ffffffffffffffff\r\nhello\r\n",
    "10000000000000000\r\nhello\r\n",
    "-1\r\nhello\r\n",
    "5\r\nhelloworld\r\n0\r\n\r\n",
    "3\nhel\n0\n\n",
    "5\r\nhello0\r\n\r\n",
    "\r\n",
    "z\r\n",
    "2\r\nhi\r\n000000000000000000000000000000000000000000\r\n\r\n",
];

/// One client's connections.
struct Client<'s> {
    address: &'s str,
    open: Option<BufReader<TcpStream>>,
}

impl Client<'_> {
    fn connection(&mut self) -> &mut BufReader<TcpStream> {
        let address = self.address;
        self.open.get_or_insert_with(|| {
            let stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.set_write_timeout(Some(PATIENCE)).unwrap();
            stream.set_nodelay(true).unwrap();
            BufReader::new(stream)
        })
    }

    /// Sends a request whose framing is right. The connection stays open if the server keeps it.
    fn send(&mut self, path: &str, content_type: &[u8], body: &[u8]) -> u16 {
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\ncontent-type: "
        );
        let request = [head.as_bytes(), content_type, b"\r\n\r\n", body].concat();
        let connection = self.connection();
        let _sent = connection.get_mut().write_all(&request);
        let Some((status, stays)) = answer(connection) else {
            panic!("no answer to {}", request.escape_ascii());
        };
        if !stays {
            self.open = None;
        }
        status
    }

    /// Sends bytes on a connection of their own and says that there are no more. Gives the status of
    /// each answer: there may be none, and there may be more of them than requests were meant.
    fn send_raw(&mut self, request: &[u8]) -> Vec<u16> {
        self.open = None;
        let connection = self.connection();
        // The server may have closed already.
        let _broken = connection.get_mut().write_all(request);
        let _closed = connection.get_mut().shutdown(Shutdown::Write);
        let mut statuses = Vec::new();
        while let Some((status, stays)) = answer(connection) {
            statuses.push(status);
            if !stays {
                break;
            }
        }
        let waited = Instant::now();
        let _reset = connection.read_to_end(&mut Vec::new());
        assert!(
            waited.elapsed() < PATIENCE,
            "the server keeps a connection that has ended"
        );
        self.open = None;
        statuses
    }
}

/// Reads one answer: its status, and whether the connection stays open; none where it has ended.
fn answer(connection: &mut BufReader<TcpStream>) -> Option<(u16, bool)> {
    let mut line = String::new();
    connection
        .read_line(&mut line)
        .ok()
        .filter(|read| *read > 0)?;
    let status = line.split(' ').nth(1).and_then(|code| code.parse().ok());
    let status: u16 = status.unwrap_or_else(|| panic!("no status line: {line:?}"));
    let (mut length, mut stays) = (0, true);
    loop {
        line.clear();
        connection.read_line(&mut line).unwrap();
        let header = line.trim_end().to_ascii_lowercase();
        match header.split_once(": ") {
            None if header.is_empty() => break,
            Some(("content-length", value)) => length = value.parse().unwrap(),
            Some(("connection", "close")) => stays = false,
            Some(("transfer-encoding", _)) => panic!("an answer in chunks was not asked for"),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    connection.read_exact(&mut body).unwrap();
    Some((status, stays))
}

/// Sends a share of the bodies.
fn send(server: &Running, mut dice: Dice, bodies: usize) -> Statuses {
    let mut clients = [&server.inference, &server.management].map(|address| Client {
        address: address.trim_start_matches("http://"),
        open: None,
    });
    let mut statuses = Statuses::default();
    let mut add = |kind, status: u16, sent: &[u8]| {
        let unanswered = status == NO_ANSWER && kind == "framing";
        assert!(
            unanswered || (200..500).contains(&status),
            "{kind}: {status} for {}",
            sent.escape_ascii()
        );
        statuses.add(kind, status);
    };
    for _ in 0..bodies {
        if dice.below(5) == 0 {
            let request = misframed(&mut dice);
            let answers = clients[dice.below(2)].send_raw(&request);
            if answers.is_empty() {
                add("framing", NO_ANSWER, &request);
            }
            for status in answers {
                add("framing", status, &request);
            }
            continue;
        }
        let whole = &WHOLE[dice.below(WHOLE.len())];
        let mut body = whole.body.as_bytes().to_vec();
        let mut content_type = whole.content_type.as_bytes().to_vec();
        let odd_type = dice.below(4) == 0;
        if odd_type {
            content_type = dice.pick(CONTENT_TYPES).as_bytes().to_vec();
        }
        if !odd_type || dice.below(2) == 0 {
            dice.break_up(&mut body, whole.words);
        }
        let client = &mut clients[usize::from(whole.kind == "registration")];
        let status = client.send(whole.path, &content_type, &body);
        add(whole.kind, status, &body);
    }
    statuses
}

/// A request whose framing is wrong, or whose chunks are.
fn misframed(dice: &mut Dice) -> Vec<u8> {
    let path = dice.pick(&["/predictions/m", "/v2/models/m/infer", "/models", "/none"]);
    let mut chunks = dice.pick(CHUNKS).as_bytes().to_vec();
    let head = if dice.below(2) == 0 {
        dice.pick(FRAMING)
    } else {
        dice.break_up(&mut chunks, &["\r\n", "0", "5", ";", "f"]);
        "transfer-encoding: chunked\r\n"
    };
    let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\n{head}\r\n");
    [head.as_bytes(), &chunks].concat()
}

#[test]
fn ten_thousand_malformed_bodies_cost_the_server_nothing_in_12() {
    let server = crate::serving("");
    serves(&server);
    let before = Holdings::of(&server);
    let started = Instant::now();
    let half = BODIES / 2 / CLIENTS as usize;
    let first = at_once(1, |_, dice| send(&server, dice, half));
    let warm = resident(&server);
    let second = at_once(1000, |_, dice| send(&server, dice, half));
    let (took, grown) = (started.elapsed(), resident(&server) - warm);
    println!(
        "{BODIES} bodies in {took:.1?}; the second half cost {grown:.1} MiB, at {warm:.0} MiB"
    );
    println!("first half: {:?}", first.0);
    assert!(grown < 8.0, "the second half cost {grown:.1} MiB");
    // The test sends what it says: most is refused, and some survives being broken.
    let refused = first.of(400) + second.of(400);
    assert!(refused > BODIES / 10, "{refused} were refused");
    let taken = first.of(200) + second.of(200);
    assert!(taken > BODIES / 10, "{taken} were taken");
    before.wait(&server);
    serves(&server);
}
