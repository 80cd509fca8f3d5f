//! What the queue is told of a request: from its headers and the model's scheduling. Pure.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ts_types::{InferRequest, RequestKind, Scheduling};

use crate::config::SequenceHeaders;
use crate::job::{Demand, InSequence};

/// The demand of a request that arrived at `arrived`. A request of a sequence that names none gets
/// one, in its headers as well.
pub(crate) fn demand(
    request: &mut InferRequest,
    scheduling: &Scheduling,
    client_timeout: Option<Duration>,
    headers: &SequenceHeaders,
    arrived: Instant,
) -> Demand {
    let level = match usize::try_from(request.urgency.priority) {
        Ok(priority) if (1..=scheduling.levels.len()).contains(&priority) => priority - 1,
        _ => scheduling.default_level,
    };
    let policy = scheduling.levels.get(level).copied().unwrap_or_default();
    let asked = request.urgency.timeout;
    let asked = asked.filter(|_| policy.allow_timeout_override);
    let timeout = [asked, client_timeout].into_iter().flatten().min();
    let group = scheduling.group_header.as_deref();
    let group = group.and_then(|name| header(request, name)).map(Box::from);
    Demand {
        level,
        group,
        deadline: timeout.and_then(|limit| arrived.checked_add(limit)),
        wait_until: policy.timeout.and_then(|limit| arrived.checked_add(limit)),
        sequence: scheduling
            .sequences
            .filter(|_| request.kind != RequestKind::Describe)
            .map(|_| in_sequence(request, headers)),
    }
}

fn in_sequence(request: &mut InferRequest, headers: &SequenceHeaders) -> InSequence {
    let id: Arc<str> = match header(request, &headers.id).filter(|id| !id.is_empty()) {
        Some(id) => Arc::from(id),
        None => {
            let id = format!("ts-seq-{}", uuid::Uuid::new_v4());
            let own = |(name, _): &(String, String)| *name != headers.id && *name != headers.start;
            request.headers.retain(own);
            let added = [(&headers.id, id.as_str()), (&headers.start, "true")];
            let added = added.map(|(name, value)| (name.clone(), value.to_owned()));
            request.headers.extend(added);
            Arc::from(id)
        }
    };
    let says =
        |name: &str| header(request, name).is_some_and(|value| value.eq_ignore_ascii_case("true"));
    InSequence {
        id,
        starts: says(&headers.start),
        ends: says(&headers.end),
    }
}

fn header<'r>(request: &'r InferRequest, name: &str) -> Option<&'r str> {
    let found = request.headers.iter().find(|(key, _)| key == name);
    found.map(|(_, value)| value.as_str())
}

#[cfg(test)]
mod tests {
    use ts_types::{LevelPolicy, ModelName, RequestId, SequencePolicy, SequenceStrategy, Urgency};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn request(headers: &[(&str, &str)], priority: u32, timeout: Option<Duration>) -> InferRequest {
        let headers = headers.iter();
        InferRequest {
            id: RequestId::random(),
            model: ModelName::new("m").unwrap(),
            version: None,
            kind: RequestKind::Predict,
            parts: vec![],
            headers: headers
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect(),
            urgency: Urgency { priority, timeout },
        }
    }

    fn demand_of(
        request: &mut InferRequest,
        scheduling: &Scheduling,
        client_timeout: Option<Duration>,
        arrived: Instant,
    ) -> Demand {
        demand(
            request,
            scheduling,
            client_timeout,
            &SequenceHeaders::default(),
            arrived,
        )
    }

    #[test]
    fn a_priority_that_the_model_lacks_gets_the_default_level() {
        let scheduling = Scheduling {
            levels: vec![LevelPolicy::default(); 3],
            default_level: 1,
            ..Scheduling::default()
        };
        for (priority, level) in [(0, 1), (1, 0), (3, 2), (4, 1), (u32::MAX, 1)] {
            let demand = demand_of(
                &mut request(&[], priority, None),
                &scheduling,
                None,
                Instant::now(),
            );
            assert_eq!(demand.level, level, "priority {priority}");
        }
    }

    #[test]
    fn a_request_may_shorten_its_time_and_never_lengthen_it() {
        let now = Instant::now();
        let forbidden = LevelPolicy {
            allow_timeout_override: false,
            ..LevelPolicy::default()
        };
        for (asked, client, policy, expected) in [
            // Works where the model has no limit of its own.
            (Some(SECOND), None, LevelPolicy::default(), Some(SECOND)),
            (
                Some(3 * SECOND),
                Some(2 * SECOND),
                LevelPolicy::default(),
                Some(2 * SECOND),
            ),
            (
                Some(SECOND),
                Some(2 * SECOND),
                LevelPolicy::default(),
                Some(SECOND),
            ),
            (Some(SECOND), Some(2 * SECOND), forbidden, Some(2 * SECOND)),
            (None, None, LevelPolicy::default(), None),
        ] {
            let scheduling = Scheduling {
                levels: vec![policy],
                ..Scheduling::default()
            };
            let demand = demand_of(&mut request(&[], 0, asked), &scheduling, client, now);
            assert_eq!(demand.deadline, expected.map(|limit| now + limit));
        }
    }

    #[test]
    fn the_group_is_the_value_of_the_header_that_the_model_names() {
        let scheduling = Scheduling {
            group_header: Some("x-language".to_owned()),
            ..Scheduling::default()
        };
        let now = Instant::now();
        let mut named = request(&[("x-language", "de")], 0, None);
        let group = demand_of(&mut named, &scheduling, None, now).group;
        assert_eq!(group.as_deref(), Some("de"));
        let group = demand_of(&mut request(&[], 0, None), &scheduling, None, now).group;
        assert_eq!(group, None);
    }

    #[test]
    fn a_request_without_a_sequence_gets_one_and_is_told() {
        let scheduling = Scheduling {
            sequences: Some(SequencePolicy {
                strategy: SequenceStrategy::Direct,
                max_idle: SECOND,
                timeout: None,
                max_sequences: 1,
                max_waiting_sequences: 0,
                max_queued: 1,
                continuous: false,
            }),
            ..Scheduling::default()
        };
        let now = Instant::now();
        let mut unnamed = request(&[("ts_request_sequence_id", "")], 0, None);
        let sequence = demand_of(&mut unnamed, &scheduling, None, now)
            .sequence
            .unwrap();
        assert!(sequence.id.starts_with("ts-seq-") && sequence.starts && !sequence.ends);
        assert_eq!(
            header(&unnamed, "ts_request_sequence_id"),
            Some(&*sequence.id)
        );
        assert_eq!(header(&unnamed, "ts_request_sequence_start"), Some("true"));
        let headers = [
            ("ts_request_sequence_id", "7"),
            ("ts_request_sequence_end", "True"),
        ];
        let sequence = demand_of(&mut request(&headers, 0, None), &scheduling, None, now).sequence;
        let sequence = sequence.unwrap();
        assert_eq!((&*sequence.id, sequence.ends), ("7", true));
        let sequence = demand_of(
            &mut request(&headers, 0, None),
            &Scheduling::default(),
            None,
            now,
        );
        assert!(sequence.sequence.is_none());
    }
}
