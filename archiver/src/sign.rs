//! `keygen` and `sign`.
#![expect(
    clippy::print_stdout,
    reason = "the report is the output of these commands"
)]

use std::process::ExitCode;

use anyhow::Result;
use ts_archive::{PrivateKey, UnpackLimits, signed};

use crate::cli::{KeygenArgs, SignArgs};

/// Makes a key and prints its id.
pub(crate) fn keygen(args: &KeygenArgs) -> Result<ExitCode> {
    let mut public = args.path.clone().into_os_string();
    public.push(".pub");
    let key = PrivateKey::create(&args.path, public.as_ref())?;
    println!("{}: key {}", args.path.display(), key.id());
    Ok(ExitCode::SUCCESS)
}

/// Signs each, in the place of an earlier signature, and prints where.
pub(crate) fn sign(args: &SignArgs) -> Result<ExitCode> {
    let key = PrivateKey::read(&args.key)?;
    for path in &args.paths {
        let signed = signed(path, &UnpackLimits::default())?;
        let signature = key.sign(path, signed)?;
        println!("{}: signed by {}", signature.display(), key.id());
    }
    Ok(ExitCode::SUCCESS)
}
