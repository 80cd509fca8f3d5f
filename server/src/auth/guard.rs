//! Asks the policy on behalf of a request, whatever protocol it came by.

use std::sync::Arc;

use super::keys::Bearer;
use super::metrics::Refusals;
use super::policy::{Rules, decide};
use super::{Action, Denied, GivenKeys, OwnKeys, TokenKind};

/// The keys that requests have to show.
pub(crate) enum Tokens {
    /// The server made them.
    Own(OwnKeys),
    /// The operator chose them.
    Given(GivenKeys),
}

/// Why a token was not replaced.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotRenewed {
    /// There are none.
    #[error("no tokens are asked for")]
    NoTokens,
    /// The server does not write keys that the operator chose.
    #[error(
        "the keys of this server were chosen by its operator. Change them where they come from; \
         `token_file` is read again when it changes"
    )]
    Given,
    /// The key file cannot be written.
    #[error("the key file could not be written")]
    KeyFile(#[from] std::io::Error),
}

/// The settings and the tokens that decide.
#[derive(Clone)]
pub(crate) struct Guard {
    model_api: bool,
    tokens: Option<Arc<Tokens>>,
    refusals: Arc<Refusals>,
}

impl Guard {
    /// `tokens` is `None` when requests need none.
    pub(crate) fn new(model_api: bool, tokens: Option<Tokens>) -> Self {
        Self {
            model_api,
            tokens: tokens.map(Arc::new),
            refusals: Arc::new(Refusals::new()),
        }
    }

    /// Whether the bearer of this `authorization`, a header or an entry of gRPC metadata, may do this.
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
        let Some(tokens) = &self.tokens else {
            return decide(action, rules, Bearer::NOBODY);
        };
        let authorization = authorization();
        let bearer = match &**tokens {
            Tokens::Own(keys) => keys.bearer(authorization),
            Tokens::Given(keys) => keys.bearer(authorization),
        };
        decide(action, rules, bearer).inspect_err(|denied| match denied {
            Denied::SwitchedOff => {}
            Denied::Token | Denied::RenewalToken if authorization.is_none() => {
                self.refusals.missing.increment(1);
            }
            Denied::Token | Denied::RenewalToken => self.refusals.wrong.increment(1),
        })
    }

    /// Whether whoever does this has to show a token.
    pub(crate) fn needs_token(&self, action: Action) -> bool {
        let rules = Rules {
            model_api: true,
            tokens: self.tokens.is_some(),
        };
        decide(action, rules, Bearer::NOBODY).is_err()
    }

    /// Replaces a token.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn renew(&self, kind: TokenKind) -> Result<(), NotRenewed> {
        match self.tokens.as_deref() {
            None => Err(NotRenewed::NoTokens),
            Some(Tokens::Given(_)) => Err(NotRenewed::Given),
            Some(Tokens::Own(keys)) => Ok(keys.renew(kind)?),
        }
    }
}
