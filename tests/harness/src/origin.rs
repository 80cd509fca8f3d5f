//! A small HTTP server that archives come from, and that answers as badly as a test wants.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// What was asked for.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Path and query.
    pub target: String,
    /// Headers, names in lower case.
    pub headers: Vec<(String, String)>,
}

impl Asked {
    fn read(stream: &TcpStream) -> Option<Self> {
        let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
        let target = lines.next()?.split(' ').nth(1)?.to_owned();
        let headers = lines
            .take_while(|line| !line.is_empty())
            .filter_map(|line| {
                let (name, value) = line.split_once(':')?;
                Some((name.to_ascii_lowercase(), value.trim().to_owned()))
            })
            .collect();
        Some(Self { target, headers })
    }

    /// The first header of this name.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }

    /// Where the range that was asked for begins.
    pub fn start(&self) -> usize {
        let range = self
            .header("range")
            .and_then(|range| range.strip_prefix("bytes="));
        range.map_or(0, |range| range.trim_end_matches('-').parse().unwrap())
    }
}

/// The server. Each connection carries one request.
pub struct Origin {
    address: SocketAddr,
    asked: Arc<Mutex<Vec<Asked>>>,
    stopped: Arc<AtomicBool>,
}

impl Origin {
    /// Starts it; `answer` writes the answer to a request, as much of it as it wants to. The number
    /// of requests before it is its third argument.
    pub fn start(
        answer: impl Fn(&Asked, &mut TcpStream, usize) -> std::io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let origin = Self {
            address: listener.local_addr().unwrap(),
            asked: Arc::default(),
            stopped: Arc::default(),
        };
        let (asked, stopped) = (Arc::clone(&origin.asked), Arc::clone(&origin.stopped));
        let answer = Arc::new(answer);
        let serving = std::thread::Builder::new().name("origin".to_owned());
        let serve = move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if stopped.load(Ordering::SeqCst) {
                    break;
                }
                let (asked, answer) = (Arc::clone(&asked), Arc::clone(&answer));
                let one = std::thread::Builder::new().name("origin-answer".to_owned());
                let respond = move || respond(stream, &asked, &*answer);
                one.spawn(respond).unwrap();
            }
        };
        serving.spawn(serve).unwrap();
        origin
    }

    /// One that answers everything with this file.
    pub fn serving(body: Vec<u8>) -> Self {
        Self::start(move |_, stream, _| write_answer(stream, "200 OK", &[], &body))
    }

    /// Its address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL of something it has.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// What it was asked for, in order.
    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        let _wakes_it = TcpStream::connect(self.address);
    }
}

fn respond(
    mut stream: TcpStream,
    asked: &Mutex<Vec<Asked>>,
    answer: &dyn Fn(&Asked, &mut TcpStream, usize) -> std::io::Result<()>,
) {
    let Some(request) = Asked::read(&stream) else {
        return;
    };
    let before = {
        let mut asked = asked.lock().unwrap();
        asked.push(request.clone());
        asked.len() - 1
    };
    // A client that has gone is the test's to judge.
    let _may_be_gone = answer(&request, &mut stream, before);
}

/// Writes a whole answer.
///
/// # Errors
/// The client has gone.
pub fn write_answer(
    stream: &mut TcpStream,
    status: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> std::io::Result<()> {
    write_head(stream, status, headers, Some(body.len()))?;
    stream.write_all(body)
}

/// Writes the head of an answer, with a length if there is one.
///
/// # Errors
/// The client has gone.
pub fn write_head(
    stream: &mut TcpStream,
    status: &str,
    headers: &[(&str, &str)],
    length: Option<usize>,
) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {status}\r\nconnection: close\r\n");
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    if let Some(length) = length {
        head.push_str(&format!("content-length: {length}\r\n"));
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes())
}
