//! Clients that misuse HTTP/2 (K6): frames by hand, over TLS. Whatever one does, its connection ends
//! or waits, the server keeps its memory, and others are served.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustls::{ClientConnection, StreamOwned};
use ts_test::Running;

use super::run;
use crate::tls::Authority;

const LIMIT: Duration = Duration::from_secs(60);

/// What a misused server may have grown by. One body that it takes has 6.5 MB.
const MAY_GROW_BY: u64 = 48 << 20;

/// Types of frames (RFC 9113, 6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Data = 0,
    Headers = 1,
    Priority = 2,
    Reset = 3,
    Settings = 4,
    Ping = 6,
    GoAway = 7,
    Window = 8,
    Continuation = 9,
}

/// A frame that the server sent.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) kind: Kind,
    pub(super) stream: u32,
    pub(super) payload: Vec<u8>,
}

impl Frame {
    /// Of a reset or a farewell.
    fn error(&self) -> u32 {
        let at = if self.kind == Kind::GoAway { 4 } else { 0 };
        u32::from_be_bytes(self.payload[at..at + 4].try_into().unwrap())
    }

    /// Whether it begins with the field of a table that all know (RFC 7541, A).
    fn is_200(&self) -> bool {
        self.payload.first() == Some(&0x88)
    }
}

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// Told where a client is cut off: by the server, or by the library for what comes in one go or
/// breaks the protocol on its way.
const CALM: [&str; 2] = ["gives up what it asks for", "connection error detected"];
const CANCEL: [u8; 4] = [0, 0, 0, 8];

fn frame(kind: Kind, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend([kind as u8, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// A header that neither side remembers (RFC 7541, 6.2.2).
fn header(name: &str, value: &str) -> Vec<u8> {
    let mut field = vec![0];
    for text in [name, value] {
        let mut length = text.len();
        if length < 127 {
            field.push(u8::try_from(length).unwrap());
        } else {
            field.push(127);
            length -= 127;
            while length >= 128 {
                field.push(u8::try_from(length % 128).unwrap() | 128);
                length /= 128;
            }
            field.push(u8::try_from(length).unwrap());
        }
        field.extend(text.as_bytes());
    }
    field
}

fn fields(method: &str, path: &str) -> Vec<u8> {
    [
        header(":method", method),
        header(":scheme", "https"),
        header(":authority", "localhost"),
        header(":path", path),
    ]
    .concat()
}

fn post() -> Vec<u8> {
    fields("POST", "/predictions/m")
}

/// A client that sends what it likes.
pub(super) struct Raw {
    stream: StreamOwned<ClientConnection, TcpStream>,
}

impl Raw {
    /// Shakes hands, and reads and answers nothing yet.
    pub(super) fn connect(authority: &Authority, server: &Running) -> Self {
        Self::with_settings(authority, server, &[])
    }

    fn with_settings(authority: &Authority, server: &Running, settings: &[u8]) -> Self {
        let mut config = authority.client(None, rustls::ALL_VERSIONS);
        config.alpn_protocols = vec![b"h2".to_vec()];
        let stream = crate::tls::connect(&server.inference, config).unwrap();
        stream.sock.set_nodelay(true).unwrap();
        let mut client = Self { stream };
        client.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
        client.send(Kind::Settings, 0, 0, settings).unwrap();
        client
    }

    /// Hears how much it may send, and says so.
    fn settle(&mut self) {
        self.wait_for(&[Kind::Window]);
        self.send(Kind::Settings, 1, 0, &[]).unwrap();
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)?;
        self.stream.flush()
    }

    fn send(&mut self, kind: Kind, flags: u8, stream: u32, payload: &[u8]) -> io::Result<()> {
        self.write(&frame(kind, flags, stream, payload))
    }

    pub(super) fn get(&mut self, stream: u32, path: &str) {
        let flags = END_STREAM | END_HEADERS;
        let head = fields("GET", path);
        self.send(Kind::Headers, flags, stream, &head).unwrap();
    }

    /// The next frame; none where the server has closed.
    fn read(&mut self) -> Option<Frame> {
        let mut head = [0; 9];
        if let Err(error) = self.stream.read_exact(&mut head) {
            assert_ne!(
                error.kind(),
                io::ErrorKind::WouldBlock,
                "the server is silent"
            );
            return None;
        }
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let stream = u32::from_be_bytes(head[5..9].try_into().unwrap());
        let mut payload = vec![0; length];
        self.stream.read_exact(&mut payload).ok()?;
        let known = [
            Kind::Data,
            Kind::Headers,
            Kind::Priority,
            Kind::Reset,
            Kind::Settings,
            Kind::Ping,
            Kind::GoAway,
            Kind::Window,
            Kind::Continuation,
        ];
        let kind = known.into_iter().find(|kind| *kind as u8 == head[3]);
        Some(Frame {
            kind: kind.unwrap(),
            stream,
            payload,
        })
    }

    /// The next frame of these kinds; others are passed over.
    pub(super) fn wait_for(&mut self, kinds: &[Kind]) -> Frame {
        self.find(kinds)
            .unwrap_or_else(|| panic!("closed before any of {kinds:?}"))
    }

    /// The same; none where the server closes before.
    fn find(&mut self, kinds: &[Kind]) -> Option<Frame> {
        let begun = Instant::now();
        loop {
            assert!(begun.elapsed() < LIMIT, "none of {kinds:?}");
            let frame = self.read()?;
            if kinds.contains(&frame.kind) {
                return Some(frame);
            }
        }
    }

    /// Writes without reading until the server closes or takes nothing for so long. Returns how
    /// many bytes it took.
    fn pour(&mut self, most: usize, next: impl FnMut() -> Vec<u8>) -> usize {
        let socket = self.stream.get_ref();
        socket
            .set_write_timeout(Some(Duration::from_secs(3)))
            .unwrap();
        let (mut next, mut sent) = (next, 0);
        while sent < most {
            let bytes = next();
            if self.write(&bytes).is_err() {
                break;
            }
            sent += bytes.len();
        }
        sent
    }

    /// Reads until the server has closed; what it said at last, if it said why.
    fn read_to_the_end(&mut self) -> Option<u32> {
        let mut error = None;
        let begun = Instant::now();
        while let Some(frame) = self.read() {
            assert!(begun.elapsed() < LIMIT, "the connection goes on");
            if frame.kind == Kind::GoAway {
                error = Some(frame.error());
            }
        }
        error
    }
}

/// Bytes of the server in memory.
fn resident(server: &Running) -> u64 {
    let status = fs_err::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kilobytes = line.unwrap().split_whitespace().nth(1).unwrap();
    kilobytes.parse::<u64>().unwrap() << 10
}

fn files(server: &Running) -> usize {
    fs_err::read_dir(format!("/proc/{}/fd", server.pid()))
        .unwrap()
        .count()
}

/// Runs a misuse, and looks at what is left of it.
fn misused(lines: &[&str], misuse: impl Fn(&Authority, &Running)) {
    let test = async |authority: &Authority, server: &mut Running| {
        let predict = || {
            server
                .infer("POST", "/predictions/m")
                .body("x")
                .send()
                .expect(200)
        };
        predict();
        let before = resident(server);
        misuse(authority, server);
        predict();
        let grown = resident(server).saturating_sub(before);
        assert!(grown < MAY_GROW_BY, "it has grown by {grown} bytes");
        server.wait_until("nothing is left in work", || {
            let page = server.metrics("/metrics").send().page();
            page.value("ts_requests_in_flight", &[]) == Some(1.0)
        });
        let waiting = &server.describe("m")["jobQueueStatus"]["pendingRequests"];
        assert_eq!(*waiting, 0);
        assert!(!server.output().contains("panicked"));
    };
    run(test, lines);
}

/// CVE-2023-44487, and its sister in which the server is made to reset (CVE-2025-8671).
#[test]
fn who_resets_what_it_opens_is_cut_off() {
    let by_client = |id| frame(Kind::Reset, 0, id, &CANCEL);
    let by_server = |id| frame(Kind::Window, 0, id, &[0; 4]);
    // In work for as long as it takes to reset it.
    let head = [post(), header("x-echo-fault", "delay=300")].concat();
    let ways: [&dyn Fn(u32) -> Vec<u8>; 2] = [&by_client, &by_server];
    for reset in ways {
        // At once, and so that each request has begun.
        for begun in [false, true] {
            let lines = [
                "job_queue_size=10000",
                "log_filter=info,ts_server::transport=debug",
            ];
            misused(&lines, |authority, server| {
                let mut client = Raw::connect(authority, server);
                for id in (1..).step_by(2).take(20_000) {
                    let head = frame(Kind::Headers, END_STREAM | END_HEADERS, id, &head);
                    let sent = if begun {
                        // The answer to the ping comes after the server has seen the request.
                        client.write(&head).and_then(|()| {
                            client.send(Kind::Ping, 0, 0, &[0; 8])?;
                            match client.find(&[Kind::Ping, Kind::GoAway]) {
                                Some(Frame {
                                    kind: Kind::Ping, ..
                                }) => client.write(&reset(id)),
                                _ => Err(io::ErrorKind::BrokenPipe.into()),
                            }
                        })
                    } else {
                        client.write(&[head, reset(id)].concat())
                    };
                    if sent.is_err() {
                        break;
                    }
                }
                server.wait_until("it is cut off", || {
                    let output = server.output();
                    CALM.iter().any(|told| output.contains(told))
                });
            });
        }
    }
}

/// CVE-2024-27316: a head without end.
#[test]
fn a_head_without_end_is_not_kept() {
    misused(&[], |authority, server| {
        let mut client = Raw::connect(authority, server);
        client.send(Kind::Headers, END_STREAM, 1, &post()).unwrap();
        let more = header("x-more", &"y".repeat(8 << 10));
        let more = frame(Kind::Continuation, 0, 1, &more);
        let sent = client.pour(256 << 20, || more.clone());
        assert!(sent < 64 << 20, "{sent} bytes of a head were taken");
    });
    // Of nothing at all.
    misused(&[], |authority, server| {
        let mut client = Raw::connect(authority, server);
        client.send(Kind::Headers, END_STREAM, 1, &post()).unwrap();
        let nothing = frame(Kind::Continuation, 0, 1, &[]).repeat(1000);
        let sent = client.pour(64 << 20, || nothing.clone());
        assert!(sent < 32 << 20, "{sent} bytes of a head were taken");
    });
}

/// A header that is said once and meant thousands of times.
#[test]
fn a_head_counts_as_what_it_means() {
    misused(&[], |authority, server| {
        let mut client = Raw::connect(authority, server);
        let mut head = post();
        // Remembered as the newest of the table, which is 62, then meant again and again.
        let mut said = header("x-large", &"y".repeat(3 << 10));
        said[0] = 0x40;
        head.extend(said);
        head.resize(head.len() + 10_000, 128 + 62);
        for id in [1, 3, 5] {
            let flags = END_STREAM | END_HEADERS;
            client.send(Kind::Headers, flags, id, &head).unwrap();
            let answer = client.wait_for(&[Kind::Headers, Kind::GoAway]);
            assert_eq!((answer.kind, answer.stream), (Kind::Headers, id));
            assert!(!answer.is_200(), "{answer:?}");
            head.truncate(post().len());
            head.resize(head.len() + 10_000, 128 + 62);
        }
        client.get(7, "/ping");
        assert_eq!(client.wait_for(&[Kind::Headers]).stream, 7);
    });
}

/// Frames that each want an answer, from a client that reads none: it waits, and is left.
#[test]
fn who_asks_and_never_reads_is_not_answered_without_end() {
    let ping = frame(Kind::Ping, 0, 0, &[7; 8]);
    let settings = frame(Kind::Settings, 0, 0, &[0, 3, 0, 0, 0, 9]);
    for asks in [ping, settings] {
        misused(&["response_write_timeout=1"], |authority, server| {
            let mut client = Raw::connect(authority, server);
            let many = asks.repeat(1000);
            let sent = client.pour(1 << 30, || many.clone());
            assert!(sent < 200 << 20, "{sent} bytes were taken");
            server.infer("GET", "/ping").send().expect(200);
        });
    }
}

/// Frames that say nothing do not keep a connection, nor others from being served.
#[test]
fn frames_that_say_nothing_do_not_keep_a_connection() {
    let nothings = [
        frame(Kind::Priority, 0, 1, &[0, 0, 0, 3, 7]),
        frame(Kind::Window, 0, 0, &[0, 0, 0, 1]),
        frame(Kind::Settings, 0, 0, &[]),
        frame(Kind::Ping, 0, 0, &[7; 8]),
    ];
    for nothing in nothings {
        misused(&["idle_connection_timeout=1"], |authority, server| {
            let mut client = Raw::connect(authority, server);
            let begun = Instant::now();
            while client.write(&nothing).is_ok() {
                assert!(begun.elapsed() < LIMIT, "it is kept by {nothing:?}");
                let socket = client.stream.get_ref();
                socket
                    .set_read_timeout(Some(Duration::from_millis(20)))
                    .unwrap();
                let mut answers = [0; 4096];
                match client.stream.read(&mut answers) {
                    Ok(0) => break,
                    Err(error) if error.kind() != io::ErrorKind::WouldBlock => break,
                    _ => {}
                }
            }
        });
    }
}

/// A body of a great many frames takes as much memory as its bytes, and one of none at all ends.
#[test]
fn memory_goes_by_the_bytes_of_a_body_not_by_its_frames() {
    misused(&[], |authority, server| {
        let mut client = Raw::connect(authority, server);
        client.settle();
        client.send(Kind::Headers, END_HEADERS, 1, &post()).unwrap();
        let bytes = frame(Kind::Data, 0, 1, b"x").repeat(1000);
        // As many as the window of a stream has.
        for _ in 0..250 {
            client.write(&bytes).unwrap();
        }
        client.send(Kind::Data, END_STREAM, 1, &[]).unwrap();
        let mut got = 0;
        while got < 250_000 {
            got += client.wait_for(&[Kind::Data]).payload.len();
            let room = 65_535_u32.to_be_bytes();
            client.send(Kind::Window, 0, 0, &room).unwrap();
            client.send(Kind::Window, 0, 1, &room).unwrap();
        }
    });
    misused(&["request_body_timeout=1"], |authority, server| {
        let mut client = Raw::connect(authority, server);
        client.send(Kind::Headers, END_HEADERS, 1, &post()).unwrap();
        let nothing = frame(Kind::Data, 0, 1, &[]).repeat(100);
        let begun = Instant::now();
        // It never reads, so only a connection that ends keeps it from sending.
        let mut taken = 0;
        while begun.elapsed() < Duration::from_secs(6) && client.write(&nothing).is_ok() {
            taken += nothing.len();
        }
        assert!(taken > 0);
    });
}

#[test]
fn streams_beyond_the_limit_are_refused_and_those_before_go_on() {
    misused(&["job_queue_size=1000"], |authority, server| {
        let mut client = Raw::connect(authority, server);
        let all: Vec<u32> = (1..).step_by(2).take(150).collect();
        let (kept, beyond) = all.split_at(100);
        for id in &all {
            client
                .send(Kind::Headers, END_HEADERS, *id, &post())
                .unwrap();
        }
        let mut refused = Vec::new();
        while refused.len() < beyond.len() {
            let reset = client.wait_for(&[Kind::Reset, Kind::GoAway]);
            assert_eq!((reset.kind, reset.error()), (Kind::Reset, 7));
            refused.push(reset.stream);
        }
        assert_eq!(refused, beyond);
        for id in kept {
            client.send(Kind::Data, END_STREAM, *id, b"x").unwrap();
        }
        let mut answered = Vec::new();
        while answered.len() < kept.len() {
            answered.push(client.wait_for(&[Kind::Headers]).stream);
        }
        answered.sort_unstable();
        assert_eq!(answered, kept);
    });
}

/// A client whose windows are shut takes nothing of its answers: each is given up in time.
#[test]
fn answers_that_nobody_takes_are_given_up() {
    let lines = ["response_write_timeout=1", "job_queue_size=1000"];
    misused(&lines, |authority, server| {
        // The window of a stream is nothing (SETTINGS_INITIAL_WINDOW_SIZE).
        let mut client = Raw::with_settings(authority, server, &[0, 4, 0, 0, 0, 0]);
        client.settle();
        let all: Vec<u32> = (1..).step_by(2).take(50).collect();
        for id in &all {
            client
                .send(Kind::Headers, END_HEADERS, *id, &post())
                .unwrap();
            client
                .send(Kind::Data, END_STREAM, *id, &[b'x'; 9000])
                .unwrap();
        }
        let mut given_up = Vec::new();
        while given_up.len() < all.len() {
            let reset = client.wait_for(&[Kind::Reset]);
            assert_eq!(reset.error(), 8, "{reset:?}");
            given_up.push(reset.stream);
        }
        given_up.sort_unstable();
        assert_eq!(given_up, all);
        // The connection itself is as good as before.
        client.send(Kind::Ping, 0, 0, &[7; 8]).unwrap();
        client.wait_for(&[Kind::Ping]);
    });
}

/// What breaks the protocol ends the connection, with a word of why.
#[test]
fn what_breaks_the_protocol_ends_its_connection() {
    let second_head = [
        frame(Kind::Headers, END_HEADERS, 1, &post()),
        frame(Kind::Headers, END_HEADERS, 1, &post()),
    ];
    let broken = [
        // A window beyond all bounds.
        frame(Kind::Window, 0, 0, &0x7fff_ffff_u32.to_be_bytes()),
        // A frame larger than any may be.
        frame(Kind::Data, 0, 1, &vec![0; 1 << 20]),
        // Data of a request that was never begun.
        frame(Kind::Data, 0, 9, b"x"),
        // The rest of a head that was never begun.
        frame(Kind::Continuation, END_HEADERS, 1, &post()),
        // A head whose names nobody said.
        frame(
            Kind::Headers,
            END_STREAM | END_HEADERS,
            1,
            &[255, 255, 255, 255, 255],
        ),
        // A number that a server uses.
        frame(Kind::Headers, END_STREAM | END_HEADERS, 2, &post()),
        second_head.concat(),
    ];
    for bytes in broken {
        misused(&[], |authority, server| {
            let mut client = Raw::connect(authority, server);
            let shown = bytes[..9].to_vec();
            let _may_be_closed = client.write(&bytes);
            let found = client.find(&[Kind::GoAway, Kind::Reset]);
            let error = found.map(|frame| frame.error());
            assert_ne!(error, Some(0), "{shown:?}");
        });
    }
}

/// RS-03: lengths are what they say, and nothing is set aside for them.
#[test]
fn lengths_that_cannot_be_are_refused_at_once() {
    for (length, taken) in [
        ("4294967297", true),
        ("3221225472", true),
        ("9223372036854775808", true),
        ("99999999999999999999", false),
        ("-1", false),
        ("+5", false),
        ("5 ", false),
        ("", false),
    ] {
        misused(&[], |authority, server| {
            let mut client = Raw::connect(authority, server);
            let head = [post(), header("content-length", length)].concat();
            client.send(Kind::Headers, END_HEADERS, 1, &head).unwrap();
            let begun = Instant::now();
            let answer = client.wait_for(&[Kind::Headers, Kind::Reset, Kind::GoAway]);
            assert!(begun.elapsed() < Duration::from_secs(5));
            // Where it can be at all, the answer is a status.
            assert!(
                !taken || answer.kind == Kind::Headers,
                "{length}: {answer:?}"
            );
        });
    }
    // Less and more than was said.
    for body in ["", "x", "xxxxxx"] {
        misused(&["request_body_timeout=1"], |authority, server| {
            let mut client = Raw::connect(authority, server);
            let head = [post(), header("content-length", "5")].concat();
            client.send(Kind::Headers, END_HEADERS, 1, &head).unwrap();
            client
                .send(Kind::Data, END_STREAM, 1, body.as_bytes())
                .unwrap();
            let answer = client.wait_for(&[Kind::Headers, Kind::Reset, Kind::GoAway]);
            if answer.kind == Kind::Headers {
                assert!(!answer.is_200(), "for {body:?}");
            }
        });
    }
}

/// RS-05: what is small on its way and large when it is unpacked.
#[test]
fn a_body_that_unpacks_beyond_the_limit_is_refused() {
    misused(&["max_request_size=1000000"], |authority, server| {
        let mut bomb = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        for _ in 0..48 {
            bomb.write_all(&vec![0; 1 << 20]).unwrap();
        }
        let bomb = bomb.finish().unwrap();
        let mut client = Raw::connect(authority, server);
        let head = [post(), header("content-encoding", "gzip")].concat();
        client.send(Kind::Headers, END_HEADERS, 1, &head).unwrap();
        for part in bomb.chunks(16 << 10) {
            if client.send(Kind::Data, 0, 1, part).is_err() {
                break;
            }
        }
        let _may_be_over = client.send(Kind::Data, END_STREAM, 1, &[]);
        let answer = client.wait_for(&[Kind::Headers]);
        assert!(!answer.is_200(), "{answer:?}");
    });
}

/// Who does not begin, or stops in the middle of a head.
#[test]
fn who_does_not_go_on_is_left() {
    let lines = ["request_head_timeout=1", "idle_connection_timeout=1"];
    let beginnings: [&[u8]; 3] = [
        b"",
        b"PRI * HTTP/2.0\r\n",
        &[
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            &frame(Kind::Settings, 0, 0, &[])[..],
            &frame(Kind::Headers, END_STREAM, 1, &post()),
        ]
        .concat(),
    ];
    for beginning in beginnings {
        misused(&lines, |authority, server| {
            let mut config = authority.client(None, rustls::ALL_VERSIONS);
            config.alpn_protocols = vec![b"h2".to_vec()];
            let stream = crate::tls::connect(&server.inference, config).unwrap();
            let mut client = Raw { stream };
            client.write(beginning).unwrap();
            assert_eq!(client.read_to_the_end().unwrap_or(0), 0);
        });
    }
}

/// A client that is gone in the middle takes its requests with it.
#[test]
fn who_leaves_in_the_middle_leaves_nothing() {
    misused(&["job_queue_size=1000"], |authority, server| {
        let before = files(server);
        for _ in 0..20 {
            let mut client = Raw::connect(authority, server);
            for id in (1..).step_by(2).take(20) {
                client
                    .send(Kind::Headers, END_HEADERS, id, &post())
                    .unwrap();
                client.send(Kind::Data, 0, id, &[b'x'; 3000]).unwrap();
            }
            // Without a word, of TLS or of HTTP/2.
            client
                .stream
                .sock
                .shutdown(std::net::Shutdown::Both)
                .unwrap();
        }
        server.wait_until("their files are closed", || files(server) <= before + 8);
    });
}

/// RS-13: probes, over a kept connection and over new ones.
#[test]
fn probes_leave_nothing_behind() {
    misused(&[], |authority, server| {
        let before = files(server);
        let mut kept = Raw::connect(authority, server);
        let paths = ["/ping", "/v2/health/ready"];
        for (id, path) in (1..).step_by(2).zip(paths.iter().cycle()).take(5000) {
            kept.get(id, path);
            assert_eq!(kept.wait_for(&[Kind::Headers]).stream, id);
            let room = 200_u32.to_be_bytes();
            kept.send(Kind::Window, 0, 0, &room).unwrap();
        }
        for path in paths.iter().cycle().take(200) {
            let mut fresh = Raw::connect(authority, server);
            fresh.get(1, path);
            fresh.wait_for(&[Kind::Headers]);
        }
        drop(kept);
        server.wait_until("their files are closed", || files(server) <= before + 8);
    });
}

/// Handshakes that are begun and not ended keep nobody out, and do not stay.
#[test]
fn half_a_handshake_keeps_nobody_out() {
    misused(&["tls_handshake_timeout=2"], |_, server| {
        let before = files(server);
        let half: Vec<_> = (0..200)
            .map(|number| {
                let mut client = TcpStream::connect(crate::tls::place(&server.inference)).unwrap();
                // Nothing, or the beginning of a hello.
                let hello = [22, 3, 1, 2, 0, 1];
                client
                    .write_all(&hello[..number % (hello.len() + 1)])
                    .unwrap();
                client
            })
            .collect();
        let begun = Instant::now();
        for _ in 0..20 {
            server.infer("GET", "/ping").send().expect(200);
        }
        assert!(begun.elapsed() < Duration::from_secs(10));
        server.wait_until("they are left", || files(server) <= before + 8);
        drop(half);
    });
}

/// A client that wants to shake hands again and again (CVE-2011-1473) is told no.
#[test]
fn nobody_shakes_hands_twice() {
    if !crate::tls::has("openssl") {
        return;
    }
    misused(&[], |_, server| {
        let place = crate::tls::place(&server.inference);
        let mut client = std::process::Command::new("openssl")
            .args(["s_client", "-tls1_2", "-connect", place])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut asks = client.stdin.take().unwrap();
        // Asks for a new handshake; openssl takes a no for the end.
        asks.write_all(b"R\n").unwrap();
        let output = client.wait_with_output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains("no renegotiation"), "{told}");
        drop(asks);
    });
}
