//! The SHA-256 of archives and members.

use std::fmt;
use std::io::Read;
use std::path::Path;
use std::str::FromStr;

use sha2::{Digest as _, Sha256};

/// A SHA-256.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

impl Digest {
    /// What was hashed.
    pub fn of(hash: Sha256) -> Self {
        Self(hash.finalize().into())
    }

    /// That of a file. It may be large: not on a thread of the runtime.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn of_file(path: &Path) -> std::io::Result<Self> {
        let mut file = fs_err::File::open(path)?;
        let mut hash = Sha256::new();
        let mut buffer = vec![0; 256 << 10];
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(Self::of(hash)),
                bytes => hash.update(&buffer[..bytes]),
            }
        }
    }
}

impl AsRef<[u8]> for Digest {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl FromStr for Digest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits: Option<Vec<u8>> = text
            .chars()
            .map(|digit| {
                digit
                    .to_digit(16)
                    .and_then(|digit| u8::try_from(digit).ok())
            })
            .collect();
        let bytes = digits.map(|digits| {
            let pairs = digits.chunks(2);
            pairs
                .map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit))
                .collect()
        });
        bytes
            .filter(|_: &Vec<u8>| text.len() == 64)
            .and_then(|bytes| bytes.try_into().ok())
            .map(Self)
            .ok_or_else(|| {
                let shown: String = text.chars().take(80).collect();
                format!("the sha256 `{shown}` is not 64 hexadecimal digits")
            })
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sixty_four_digits_are_a_digest() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let digest: Digest = empty.to_uppercase().parse().unwrap();
        assert_eq!(digest.to_string(), empty);
        assert_eq!(digest, Digest::of(Sha256::new()));
        let long = format!("{empty}00");
        for bad in [
            "",
            "0",
            &empty[1..],
            &long,
            &empty.replace('e', "g"),
            &"é".repeat(32),
        ] {
            let error = bad.parse::<Digest>().unwrap_err();
            assert!(error.contains("64 hexadecimal digits"), "{bad}: {error}");
        }
    }
}
