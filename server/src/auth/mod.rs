//! Who may do what: every route names its [`Action`], [`policy`] decides on it, [`guard`] asks.

mod guard;
mod policy;
mod tokens;

pub(crate) use guard::Guard;
pub(crate) use policy::{Action, Denied};
pub(crate) use tokens::{KEY_FILE, TokenKind, Tokens};
