//! May this be done? A pure function of the action, the settings and the token, the same for every
//! transport.

use super::keys::{Bearer, TokenKind};

/// What a route does, as far as permission goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Ask a model, or after the server's health.
    Infer,
    /// Look at models, scale them, choose defaults.
    Manage,
    /// Add or remove a model.
    ChangeModels,
    /// Replace a token.
    RenewToken,
    /// Read metrics.
    ReadMetrics,
    /// Ask whether the server is alive or ready: a probe cannot fetch a token.
    Probe,
    /// Ask whether a model is ready.
    ProbeModel,
    /// Ask what there is and how it is asked for.
    AskOptions,
}

/// Why not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Denied {
    /// The API that the action belongs to is switched off.
    SwitchedOff,
    /// No token, or not the right one.
    Token,
    /// The same for renewing a token, which is worded differently.
    RenewalToken,
}

/// What the operator settled.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// `enable_model_api`.
    pub(crate) model_api: bool,
    /// Tokens are asked for.
    pub(crate) tokens: bool,
}

/// Decides. `bearer` is what the token that came with the request is good for.
pub(crate) fn decide(action: Action, rules: Rules, bearer: Bearer) -> Result<(), Denied> {
    let needed: &[TokenKind] = match action {
        Action::Infer => &[TokenKind::Inference],
        Action::Manage | Action::ChangeModels => &[TokenKind::Management],
        Action::ProbeModel => &[TokenKind::Inference, TokenKind::Management],
        Action::RenewToken => &[TokenKind::Api],
        Action::ReadMetrics | Action::AskOptions | Action::Probe => &[],
    };
    let has_one = || needed.iter().any(|kind| bearer.holds(*kind));
    if rules.tokens && !needed.is_empty() && !has_one() {
        return Err(match action {
            Action::RenewToken => Denied::RenewalToken,
            _ => Denied::Token,
        });
    }
    if action == Action::ChangeModels && !rules.model_api {
        return Err(Denied::SwitchedOff);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACTIONS: [Action; 8] = [
        Action::Infer,
        Action::Manage,
        Action::ChangeModels,
        Action::RenewToken,
        Action::ReadMetrics,
        Action::AskOptions,
        Action::Probe,
        Action::ProbeModel,
    ];

    #[test]
    fn only_changing_models_needs_the_model_api() {
        let rules = Rules {
            model_api: false,
            tokens: false,
        };
        for action in ACTIONS {
            let expected = match action {
                Action::ChangeModels => Err(Denied::SwitchedOff),
                _ => Ok(()),
            };
            assert_eq!(
                decide(action, rules, Bearer::NOBODY),
                expected,
                "{action:?}"
            );
        }
    }

    #[test]
    fn each_action_takes_its_own_kind_of_token_only() {
        let rules = Rules {
            model_api: true,
            tokens: true,
        };
        let kinds = [TokenKind::Inference, TokenKind::Management, TokenKind::Api];
        for action in ACTIONS {
            let good: Vec<_> = kinds
                .into_iter()
                .filter(|kind| decide(action, rules, Bearer::of(*kind)).is_ok())
                .collect();
            let expected = match action {
                Action::Infer => vec![TokenKind::Inference],
                Action::Manage | Action::ChangeModels => vec![TokenKind::Management],
                Action::RenewToken => vec![TokenKind::Api],
                Action::ProbeModel => vec![TokenKind::Inference, TokenKind::Management],
                Action::ReadMetrics | Action::AskOptions | Action::Probe => kinds.to_vec(),
            };
            assert_eq!(good, expected, "{action:?}");
            let nobody = decide(action, rules, Bearer::NOBODY).is_ok();
            let open = matches!(
                action,
                Action::ReadMetrics | Action::AskOptions | Action::Probe
            );
            assert_eq!(nobody, open, "{action:?}");
        }
    }
}
