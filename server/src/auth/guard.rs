//! Asks the policy on behalf of a request.

use std::sync::Arc;

use super::policy::{Rules, decide};
use super::tokens::Bearer;
use super::{Action, Denied, TokenKind, Tokens};

/// The settings and the tokens that decide.
#[derive(Clone)]
pub(crate) struct Guard {
    model_api: bool,
    tokens: Option<Arc<Tokens>>,
}

impl Guard {
    /// `tokens` is `None` when requests need none.
    pub(crate) fn new(model_api: bool, tokens: Option<Arc<Tokens>>) -> Self {
        Self { model_api, tokens }
    }

    /// Whether the bearer of this `Authorization` header may do this.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn check<'h>(
        &self,
        action: Action,
        authorization: impl FnOnce() -> Option<&'h str>,
    ) -> Result<(), Denied> {
        let rules = Rules {
            model_api: self.model_api,
            tokens: self.tokens.is_some(),
        };
        let bearer = match &self.tokens {
            Some(tokens) => tokens.bearer(authorization()),
            None => Bearer::Nobody,
        };
        decide(action, rules, bearer)
    }

    /// Whether whoever does this has to show a token.
    pub(crate) fn needs_token(&self, action: Action) -> bool {
        let rules = Rules {
            model_api: true,
            tokens: self.tokens.is_some(),
        };
        decide(action, rules, Bearer::Nobody).is_err()
    }

    /// Whether there are tokens at all.
    pub(crate) fn has_tokens(&self) -> bool {
        self.tokens.is_some()
    }

    /// Replaces a token.
    ///
    /// # Errors
    /// The key file cannot be written.
    pub(crate) fn renew(&self, kind: TokenKind) -> std::io::Result<()> {
        self.tokens
            .as_ref()
            .map_or(Ok(()), |tokens| tokens.renew(kind))
    }
}
