//! `inspect` and `verify`: what they find, for people or as JSON.
#![expect(
    clippy::print_stdout,
    reason = "the report is the output of these commands"
)]

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use ts_archive::{Inspection, TrustedKeys, UnpackLimits, strict_problem};
use ts_types::LoadPolicy;

use crate::cli::{LookArgs, VerifyArgs};

/// Prints what is in an archive.
pub(crate) fn inspect(args: &LookArgs) -> Result<ExitCode> {
    let found = ts_archive::inspect(&args.path, &UnpackLimits::default())?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&found)?);
    } else {
        print_inspection(&found)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print_inspection(found: &Inspection) -> Result<()> {
    println!("format: {}", found.format);
    match &found.manifest {
        Some(manifest) => println!("manifest: {}", serde_json::to_string_pretty(manifest)?),
        None => println!("manifest: none"),
    }
    println!("{:>14} {:>14}  {:64}  path", "size", "in archive", "sha256");
    for member in &found.members {
        let compressed = member
            .compressed_size
            .map_or("-".to_owned(), |bytes| bytes.to_string());
        println!(
            "{:>14} {compressed:>14}  {}  {}",
            member.size, member.sha256, member.path
        );
    }
    Ok(())
}

/// Prints why a server would not load an archive; the exit code is 1 if there is a reason.
pub(crate) fn verify(args: &VerifyArgs) -> Result<ExitCode> {
    let (limits, path) = (UnpackLimits::default(), &args.look.path);
    let mut problems = ts_archive::verify(path, &limits)?;
    if !args.trusted_keys.is_empty() {
        let keys = TrustedKeys::read(args.trusted_keys.iter().map(PathBuf::as_path));
        let keys = keys.map_err(anyhow::Error::msg)?;
        problems.extend(keys.problem(path, &limits)?);
    }
    // What cannot be unpacked has its problem already.
    if args.load_policy == LoadPolicy::Strict && problems.is_empty() {
        problems.extend(strict_problem(path, &limits)?);
    }
    let args = &args.look;
    if args.json {
        println!(
            "{}",
            serde_json::json!({ "ok": problems.is_empty(), "problems": problems })
        );
    } else if problems.is_empty() {
        println!("{}: would load", args.path.display());
    } else {
        for problem in &problems {
            println!("{}: {}", problem.about, problem.message);
        }
    }
    Ok(if problems.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
