//! `inspect` and `verify`: what they find, for people or as JSON.
#![expect(
    clippy::print_stdout,
    reason = "the report is the output of these commands"
)]

use std::process::ExitCode;

use anyhow::Result;
use ts_archive::{Inspection, UnpackLimits};

use crate::cli::LookArgs;

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
pub(crate) fn verify(args: &LookArgs) -> Result<ExitCode> {
    let problems = ts_archive::verify(&args.path, &UnpackLimits::default())?;
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
