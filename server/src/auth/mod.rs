//! Who may do what: every route names its [`Action`], [`policy`] decides on it, [`guard`] asks.
//!
//! `keys` are what requests show; they are the server's [`own`], told in a file, or [`given`] by the
//! operator.

mod given;
mod guard;
mod keys;
mod metrics;
mod own;
mod policy;

pub(crate) use given::{GivenKeys, KeySources};
pub(crate) use guard::{Guard, NotRenewed, Tokens};
pub(crate) use keys::TokenKind;
pub(crate) use own::{KEY_FILE, OwnKeys};
pub(crate) use policy::{Action, Denied};
