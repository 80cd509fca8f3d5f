//! Whether bytes are the beginning of a pickle. From protocol 2 on one says so itself; an older one is
//! a row of printable commands, so it is followed until it would call something or turns out to be no
//! pickle, as text does within a few letters.

/// Commands that push one value, by what follows them.
const PUSHES: &[(u8, After)] = &[
    (b'N', After::Bytes(0)),
    (b'I', After::Number),
    (b'L', After::Number),
    (b'F', After::Number),
    (b'g', After::Number),
    (b'S', After::Quoted),
    (b'V', After::Line),
    (b'P', After::Line),
    (b'K', After::Bytes(1)),
    (b'M', After::Bytes(2)),
    (b'J', After::Bytes(4)),
    (b'G', After::Bytes(8)),
    (b'h', After::Bytes(1)),
    (b'j', After::Bytes(4)),
    (b'U', After::Counted(1)),
    (b'T', After::Counted(4)),
    (b'X', After::Counted(4)),
    (b'C', After::Counted(1)),
    (b'B', After::Counted(4)),
    (0x8a, After::Counted(1)),
    (0x8b, After::Counted(4)),
    (0x8c, After::Counted(1)),
    (0x8d, After::Counted(8)),
    (0x8e, After::Counted(8)),
    (0x96, After::Counted(8)),
    (0x88, After::Bytes(0)),
    (0x89, After::Bytes(0)),
    (0x8f, After::Bytes(0)),
    (0x97, After::Bytes(0)),
    (b']', After::Bytes(0)),
    (b')', After::Bytes(0)),
    (b'}', After::Bytes(0)),
];

/// What a pickle of protocol 2 or above may go on with after its number.
const AFTER_PROTOCOL: &[u8] =
    b"NILFgSVPKMJGhjUTXCB])}(.c\x80\x8a\x8b\x8c\x8d\x8e\x88\x89\x8f\x95\x96\x97";

/// The newest protocol.
const NEWEST: u8 = 5;

/// What follows a command.
#[derive(Clone, Copy)]
enum After {
    /// So many bytes.
    Bytes(usize),
    /// A count of so many bytes, and as many bytes as it says.
    Counted(usize),
    /// Text to the end of the line.
    Line,
    /// A number to the end of the line.
    Number,
    /// Quoted text to the end of the line.
    Quoted,
}

/// Whether these first bytes of a file, which may go on, are those of a pickle that names something, or
/// of one that says that it is a pickle.
pub(super) fn begins_like_pickle(bytes: &[u8], goes_on: bool) -> bool {
    if let [0x80, 2..=NEWEST, next, ..] = bytes {
        return AFTER_PROTOCOL.contains(next);
    }
    Walk {
        rest: bytes,
        depths: vec![0],
        has_name: false,
        goes_on,
    }
    .calls_something()
    .unwrap_or(false)
}

/// The commands, and how many values there would be on the stack above each mark.
struct Walk<'b> {
    rest: &'b [u8],
    depths: Vec<usize>,
    /// A class or function was named.
    has_name: bool,
    goes_on: bool,
}

impl<'b> Walk<'b> {
    /// `None` where it is no pickle.
    fn calls_something(&mut self) -> Option<bool> {
        loop {
            let Some((&command, rest)) = self.rest.split_first() else {
                // Where more follows than was looked at, it may call what it has named.
                return Some(self.has_name && self.goes_on);
            };
            self.rest = rest;
            if let Some((_, after)) = PUSHES.iter().find(|(push, _)| *push == command) {
                self.skip(*after)?;
                self.push();
                continue;
            }
            match command {
                b'.' => return Some(self.has_name),
                b'(' => self.depths.push(0),
                b'c' => {
                    self.name()?;
                    self.push();
                }
                b'i' => {
                    self.name()?;
                    self.close_mark()?;
                    return Some(true);
                }
                0x93 => {
                    self.replace(2, 1)?;
                    self.has_name = true;
                }
                // Numbers that stand for names.
                0x82..=0x84 => return Some(true),
                b'R' | b'b' | 0x81 => {
                    self.replace(2, 1)?;
                    if self.has_name {
                        return Some(true);
                    }
                }
                0x92 => {
                    self.replace(3, 1)?;
                    if self.has_name {
                        return Some(true);
                    }
                }
                b'o' => {
                    self.close_mark()?;
                    return Some(self.has_name);
                }
                b't' | b'l' | b'd' | 0x91 => {
                    self.close_mark()?;
                    self.push();
                }
                b'e' | b'u' | 0x90 => {
                    self.close_mark()?;
                    self.replace(1, 1)?;
                }
                b'1' => self.close_mark()?,
                b'0' => self.replace(1, 0)?,
                b'2' => self.replace(1, 2)?,
                b'a' => self.replace(2, 1)?,
                b's' => self.replace(3, 1)?,
                0x85 | b'Q' | 0x98 => self.replace(1, 1)?,
                0x86 => self.replace(2, 1)?,
                0x87 => self.replace(3, 1)?,
                b'p' => self.skip(After::Number)?,
                b'q' | 0x80 => self.skip(After::Bytes(1))?,
                b'r' => self.skip(After::Bytes(4))?,
                0x94 => {}
                0x95 => self.skip(After::Bytes(8))?,
                _ => return None,
            }
        }
    }

    fn push(&mut self) {
        if let Some(depth) = self.depths.last_mut() {
            *depth += 1;
        }
    }

    fn replace(&mut self, taken: usize, put: usize) -> Option<()> {
        let depth = self.depths.last_mut()?;
        *depth = depth.checked_sub(taken)? + put;
        Some(())
    }

    fn close_mark(&mut self) -> Option<()> {
        self.depths.pop();
        (!self.depths.is_empty()).then_some(())
    }

    fn skip(&mut self, after: After) -> Option<()> {
        match after {
            After::Bytes(count) => {
                self.take(count);
                Some(())
            }
            After::Counted(width) => {
                let count = self.take(width);
                let count = count
                    .iter()
                    .rev()
                    .fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
                self.take(usize::try_from(count).unwrap_or(usize::MAX));
                Some(())
            }
            After::Line => self.line().map(drop),
            After::Number => {
                let text = std::str::from_utf8(self.line()?).ok()?;
                text.trim_end_matches('L').parse::<f64>().ok().map(drop)
            }
            After::Quoted => {
                let line = self.line()?;
                let quote = *line.first()?;
                let quoted = line.len() > 1 && line.last() == Some(&quote);
                (quoted && (quote == b'\'' || quote == b'"')).then_some(())
            }
        }
    }

    /// A module and what is in it.
    fn name(&mut self) -> Option<()> {
        for _ in 0..2 {
            let line = self.line()?;
            if line.is_empty() || line.iter().any(u8::is_ascii_whitespace) {
                return None;
            }
        }
        self.has_name = true;
        Some(())
    }

    /// As many bytes as there are; where the sample ends the walk does too.
    fn take(&mut self, count: usize) -> &'b [u8] {
        let (taken, rest) = self.rest.split_at(count.min(self.rest.len()));
        self.rest = rest;
        taken
    }

    fn line(&mut self) -> Option<&'b [u8]> {
        let end = self.rest.iter().position(|byte| *byte == b'\n')?;
        let line = self.take(end);
        self.take(1);
        Some(line)
    }
}
