//! The command line of `torch-model-archiver`, tried on the real program. Tests that stem from a
//! published fault of TorchServe's archiver are named after its entry, such as `ar_01`.
#![expect(clippy::unwrap_used, reason = "a helper of tests fails as a test does")]

mod faults;
mod flags;
mod large;
mod look;
mod sandbox;
