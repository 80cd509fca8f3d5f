//! Which request the running code works for: what its log lines and spans are marked with.

use std::sync::Arc;

use ts_serving::Course;
use ts_types::RequestId;

tokio::task_local! {
    static CURRENT: RequestContext;
}

/// A request, as far as logs and spans have to know it.
#[derive(Debug, Clone)]
pub(crate) struct RequestContext {
    /// As the client sees it in `x-request-id`.
    pub(crate) id: RequestId,
    /// The `traceparent` of whatever is done for it: the server's own span, or the client's where
    /// the server makes none.
    pub(crate) trace_parent: Option<Arc<str>>,
    /// Where the core is to note what becomes of it, if somebody will look.
    pub(crate) course: Option<Course>,
}

impl RequestContext {
    /// Runs a future on behalf of this request.
    pub(crate) fn scope<F: Future>(self, work: F) -> impl Future<Output = F::Output> {
        CURRENT.scope(self, work)
    }

    /// Looks at the request that the caller runs on behalf of, if it does.
    pub(crate) fn with<T>(look: impl FnOnce(&Self) -> T) -> Option<T> {
        CURRENT.try_with(look).ok()
    }

    /// The id of the trace that it belongs to, in hexadecimal.
    pub(crate) fn trace_id(&self) -> Option<&str> {
        self.trace_parent.as_deref()?.split('-').nth(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn code_that_runs_for_a_request_knows_it_and_other_code_knows_none() {
        let id = || RequestContext::with(|context| context.id.as_str().to_owned());
        assert_eq!(id(), None);
        let context = RequestContext {
            id: RequestId::of_client("mine-1").unwrap(),
            trace_parent: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into()),
            course: None,
        };
        assert_eq!(context.trace_id(), Some("0af7651916cd43dd8448eb211c80319c"));
        let seen = context.scope(async { id() }).await;
        assert_eq!(seen.as_deref(), Some("mine-1"));
        assert_eq!(id(), None);
    }
}
