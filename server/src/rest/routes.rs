//! Every path of every listener (*torchserve-contract* 4.3, 5.1).

use actix_web::http::Method;

use super::RestError;
use crate::auth::Action;

/// The APIs that a listener serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Surface {
    /// Inference.
    pub(crate) inference: bool,
    /// Management.
    pub(crate) management: bool,
    /// Metrics.
    pub(crate) metrics: bool,
}

impl Surface {
    /// Nothing.
    pub(crate) const NONE: Self = Self {
        inference: false,
        management: false,
        metrics: false,
    };
}

/// An explanation or an answer, and where the model's name comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Predict<'p> {
    /// The model; `None` where the request names it elsewhere.
    pub(crate) model: Option<&'p str>,
    /// The version.
    pub(crate) version: Option<&'p str>,
    /// What the handler is told besides the client's headers.
    pub(crate) told: Told<'p>,
}

/// What a route adds for the handler (*torchserve-contract* 4.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told<'p> {
    /// The rest of the path, and whether an explanation is wanted.
    Route {
        /// `url_path`.
        url_path: &'p str,
        /// `explain`.
        explain: bool,
    },
    /// Whether an explanation is wanted: the paths of `KServe`, whose bodies go to the handler, or
    /// its envelope, as they are.
    Explain(bool),
    /// Nothing, but query parameters come as fields.
    QueryFields,
}

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route<'p> {
    /// Is the server healthy?
    Ping,
    /// Is the server alive?
    Live,
    /// Is the server ready?
    ServerReady,
    /// Is a model ready?
    ModelReady {
        /// The model.
        model: &'p str,
        /// The version.
        version: Option<&'p str>,
    },
    /// Run a model.
    Predict(Predict<'p>),
    /// List models.
    List,
    /// Register a model.
    Register,
    /// Describe the default version, one or all.
    Describe {
        /// The model.
        model: &'p str,
        /// The version, or `all`.
        version: Option<&'p str>,
    },
    /// Explain how batches come about.
    Batching {
        /// The model.
        model: &'p str,
        /// The version.
        version: Option<&'p str>,
    },
    /// Change the number of workers.
    Scale {
        /// The model.
        model: &'p str,
        /// The version.
        version: Option<&'p str>,
    },
    /// Choose the default version.
    SetDefault {
        /// The model.
        model: &'p str,
        /// The version.
        version: &'p str,
    },
    /// Remove a version.
    Unregister {
        /// The model.
        model: &'p str,
        /// The version.
        version: Option<&'p str>,
    },
    /// Does a model have workers, in the form of `KServe`?
    Ready {
        /// The model.
        model: &'p str,
    },
    /// Replace a token.
    RenewToken,
    /// What is logged.
    Logging,
    /// Log something else.
    ChangeLogging,
    /// Metrics as text.
    Metrics,
    /// What can be asked here.
    Description(Description<'p>),
    /// Which methods a path has; a browser asks before it sends anything else.
    Options,
}

/// Which description is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Description<'p> {
    /// TorchServe's of this listener.
    Listener,
    /// TorchServe's of one model's predictions.
    Predictions {
        /// The model.
        model: &'p str,
        /// The version.
        version: Option<&'p str>,
    },
    /// TorchServe's of one model's management.
    Management {
        /// The model.
        model: &'p str,
        /// The version, or `all`.
        version: Option<&'p str>,
    },
    /// Ours of this listener, for programs.
    Ours,
    /// The same for people.
    Page,
}

impl<'p> Route<'p> {
    /// The description that `OPTIONS` of the same path gives, where there is one.
    fn described_by_options(self) -> Option<Description<'p>> {
        match self {
            Self::Predict(Predict {
                model: Some(model),
                version,
                told:
                    Told::Route {
                        url_path: "",
                        explain: false,
                    },
            }) => Some(Description::Predictions { model, version }),
            Self::Describe { model, version } => Some(Description::Management { model, version }),
            Self::Description(Description::Listener) => Some(Description::Listener),
            _ => None,
        }
    }

    /// What it does, as far as permission goes.
    pub(crate) fn action(&self) -> Action {
        match self {
            Self::Ping | Self::Predict(_) => Action::Infer,
            Self::List
            | Self::Describe { .. }
            | Self::Batching { .. }
            | Self::Scale { .. }
            | Self::SetDefault { .. }
            | Self::Ready { .. }
            | Self::Logging
            | Self::ChangeLogging => Action::Manage,
            Self::Register | Self::Unregister { .. } => Action::ChangeModels,
            Self::RenewToken => Action::RenewToken,
            Self::Metrics => Action::ReadMetrics,
            Self::Description(_) | Self::Options => Action::AskOptions,
            Self::Live | Self::ServerReady => Action::Probe,
            Self::ModelReady { .. } => Action::ProbeModel,
        }
    }
}

/// The route of a decoded path. Slashes at the end do not count.
///
/// # Errors
/// No such path here, or not for this method.
pub(crate) fn find<'p>(
    surface: Surface,
    method: &Method,
    path: &'p str,
) -> Result<Route<'p>, RestError> {
    let path = path.strip_prefix('/').unwrap_or(path).trim_end_matches('/');
    if *method == Method::OPTIONS {
        // Never runs a model; any other method of a path tells whether the path is there.
        return match find_as(surface, &Method::GET, path) {
            Err(RestError::NoSuchRoute) => Err(RestError::NoSuchRoute),
            _ if path.is_empty() => Ok(Route::Description(Description::Listener)),
            Ok(found) => Ok(found
                .described_by_options()
                .map_or(Route::Options, Route::Description)),
            Err(_) => Ok(Route::Options),
        };
    }
    find_as(surface, method, path)
}

fn find_as<'p>(surface: Surface, method: &Method, path: &'p str) -> Result<Route<'p>, RestError> {
    if surface != Surface::NONE
        && let Some(description) = description(path)
    {
        return match description {
            Description::Ours | Description::Page
                if *method != Method::GET && *method != Method::HEAD =>
            {
                Err(RestError::NotAllowed)
            }
            description => Ok(Route::Description(description)),
        };
    }
    if (surface.inference || surface.management)
        && let Some(route) = health(path)
    {
        return match *method {
            Method::GET | Method::HEAD => Ok(route),
            _ => Err(RestError::NotAllowed),
        };
    }
    if surface.inference
        && let Some(route) = inference(path)
    {
        return Ok(route);
    }
    if surface.management
        && let Some(route) = management(method, path)
    {
        return route;
    }
    if surface.metrics && (path == "metrics" || path.starts_with("metrics/")) {
        return Ok(Route::Metrics);
    }
    if path.is_empty() {
        Err(RestError::NotAllowed)
    } else {
        Err(RestError::NoSuchRoute)
    }
}

/// What every listener has.
fn description(path: &str) -> Option<Description<'_>> {
    match path {
        "api-description" => Some(Description::Listener),
        "openapi.json" => Some(Description::Ours),
        "docs" => Some(Description::Page),
        _ => None,
    }
}

/// What inference and management have in common: probes go where they can.
fn health(path: &str) -> Option<Route<'_>> {
    match path.strip_prefix("v2/")? {
        "health/live" => Some(Route::Live),
        "health/ready" => Some(Route::ServerReady),
        rest => {
            let named = rest.strip_prefix("models/")?.strip_suffix("/ready")?;
            let (model, version) = match named.split_once('/') {
                None => (named, None),
                Some((model, rest)) => (model, Some(rest.strip_prefix("versions/")?)),
            };
            let is_one_segment = version.is_none_or(|version| !version.contains('/'));
            is_one_segment.then_some(Route::ModelReady { model, version })
        }
    }
}

/// Inference does not look at the method.
fn inference(path: &str) -> Option<Route<'_>> {
    let mut segments = path.splitn(4, '/');
    let [first, model, version, rest] = std::array::from_fn(|_| segments.next());
    let predict = |version, told| {
        Route::Predict(Predict {
            model,
            version,
            told,
        })
    };
    match (first?, model, version, rest) {
        ("ping", None, ..) => Some(Route::Ping),
        (first @ ("predictions" | "explanations"), Some(_), version, rest) => {
            let explain = first == "explanations";
            let url_path = rest.unwrap_or_default();
            Some(predict(version, Told::Route { url_path, explain }))
        }
        ("invocations", None, ..) | ("models", Some(_), Some("invoke"), None) => {
            Some(predict(None, Told::QueryFields))
        }
        ("models", ..) => None,
        ("v1", Some("models"), Some(call), None) => {
            let (model, verb) = call.split_once(':')?;
            let explain = match verb {
                "predict" => false,
                "explain" => true,
                _ => return None,
            };
            let told = Told::Explain(explain);
            Some(Route::Predict(Predict {
                model: Some(model),
                version: None,
                told,
            }))
        }
        ("v2", Some("models"), model, Some(verb @ ("infer" | "explain"))) => {
            let told = Told::Explain(verb == "explain");
            Some(Route::Predict(Predict {
                model,
                version: None,
                told,
            }))
        }
        // Multi Model Server's paths have the model in front.
        (name, Some("predict"), None, None) | (name, Some(_), Some("predict"), None) => {
            let version = model.filter(|_| version.is_some());
            Some(Route::Predict(Predict {
                model: Some(name),
                version,
                told: Told::QueryFields,
            }))
        }
        _ => None,
    }
}

fn management<'p>(method: &Method, path: &'p str) -> Option<Result<Route<'p>, RestError>> {
    let mut segments = path.splitn(5, '/');
    let [first, model, version, last, more] = std::array::from_fn(|_| segments.next());
    let route = match (first?, model, version, last, more) {
        ("models", None, ..) => match *method {
            Method::GET => Ok(Route::List),
            Method::POST => Ok(Route::Register),
            _ => Err(RestError::NotAllowed),
        },
        ("models", Some(model), Some("batching"), None, _) if *method == Method::GET => {
            let version = None;
            Ok(Route::Batching { model, version })
        }
        ("models", Some(model), version @ Some(_), Some("batching"), None) => match *method {
            Method::GET => Ok(Route::Batching { model, version }),
            _ => Err(RestError::NotAllowed),
        },
        ("models", Some(model), version, None, _) => match *method {
            Method::GET => Ok(Route::Describe { model, version }),
            Method::PUT => Ok(Route::Scale { model, version }),
            Method::DELETE => Ok(Route::Unregister { model, version }),
            _ => Err(RestError::NotAllowed),
        },
        ("models", Some(model), Some(version), Some("set-default"), None) => match *method {
            Method::PUT => Ok(Route::SetDefault { model, version }),
            _ => Err(RestError::NotAllowed),
        },
        ("v1", Some("models"), Some(model), None, _) => match *method {
            Method::GET => Ok(Route::Ready { model }),
            _ => Err(RestError::NotAllowed),
        },
        ("token", None, ..) => match *method {
            Method::GET => Ok(Route::RenewToken),
            _ => Err(RestError::NotAllowed),
        },
        ("logging", None, ..) => match *method {
            Method::GET => Ok(Route::Logging),
            Method::PUT => Ok(Route::ChangeLogging),
            _ => Err(RestError::NotAllowed),
        },
        _ => return None,
    };
    Some(route)
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFERENCE: Surface = Surface {
        inference: true,
        ..Surface::NONE
    };
    const MANAGEMENT: Surface = Surface {
        management: true,
        ..Surface::NONE
    };
    const METRICS: Surface = Surface {
        metrics: true,
        ..Surface::NONE
    };
    const ALL: Surface = Surface {
        inference: true,
        management: true,
        metrics: true,
    };

    fn predict(path: &str) -> (Option<&str>, Option<&str>, &str, bool) {
        match find(INFERENCE, &Method::GET, path).unwrap() {
            Route::Predict(Predict {
                model,
                version,
                told: Told::Route { url_path, explain },
            }) => (model, version, url_path, explain),
            other => panic!("{path} is {other:?}"),
        }
    }

    #[test]
    fn predictions_name_model_version_and_rest() {
        assert_eq!(predict("/predictions/m"), (Some("m"), None, "", false));
        assert_eq!(
            predict("/predictions/m/1.0/"),
            (Some("m"), Some("1.0"), "", false)
        );
        let rest = "/explanations/m/1.0/v1/chat//x";
        assert_eq!(predict(rest), (Some("m"), Some("1.0"), "v1/chat//x", true));
        assert!(find(INFERENCE, &Method::GET, "/predictions/").is_err());
    }

    #[test]
    fn sagemaker_and_older_paths_give_query_fields() {
        for (path, model, version) in [
            ("/invocations", None, None),
            ("/models/m/invoke", Some("m"), None),
            ("/m/predict", Some("m"), None),
            ("/m/1.0/predict", Some("m"), Some("1.0")),
        ] {
            let expected = Route::Predict(Predict {
                model,
                version,
                told: Told::QueryFields,
            });
            assert_eq!(
                find(INFERENCE, &Method::POST, path).unwrap(),
                expected,
                "{path}"
            );
        }
    }

    #[test]
    fn kserve_paths_say_whether_an_explanation_is_wanted() {
        for (path, explain) in [
            ("/v1/models/m:predict", false),
            ("/v1/models/m:explain", true),
            ("/v2/models/m/infer", false),
            ("/v2/models/m/explain", true),
        ] {
            let told = Told::Explain(explain);
            let expected = Route::Predict(Predict {
                model: Some("m"),
                version: None,
                told,
            });
            assert_eq!(find(ALL, &Method::POST, path).unwrap(), expected, "{path}");
        }
        for path in [
            "/v1/models/m:other",
            "/v1/models/m",
            "/v2/models/m",
            "/v2/models/m/ready",
        ] {
            assert!(find(INFERENCE, &Method::POST, path).is_err(), "{path}");
        }
    }

    #[test]
    fn management_looks_at_the_method() {
        let rows = [
            (Method::GET, "/models/", Route::List),
            (Method::POST, "/models", Route::Register),
            (
                Method::GET,
                "/models/m/all",
                Route::Describe {
                    model: "m",
                    version: Some("all"),
                },
            ),
            (
                Method::GET,
                "/models/m/batching",
                Route::Batching {
                    model: "m",
                    version: None,
                },
            ),
            (
                Method::GET,
                "/models/m/2/batching",
                Route::Batching {
                    model: "m",
                    version: Some("2"),
                },
            ),
            (
                Method::PUT,
                "/models/m",
                Route::Scale {
                    model: "m",
                    version: None,
                },
            ),
            (
                Method::DELETE,
                "/models/m/1/",
                Route::Unregister {
                    model: "m",
                    version: Some("1"),
                },
            ),
            (
                Method::PUT,
                "/models/m/1/set-default",
                Route::SetDefault {
                    model: "m",
                    version: "1",
                },
            ),
            (Method::GET, "/v1/models/m", Route::Ready { model: "m" }),
        ];
        for (method, path, route) in rows {
            assert_eq!(find(MANAGEMENT, &method, path).unwrap(), route);
            assert_eq!(find(ALL, &method, path).unwrap(), route);
            assert!(find(INFERENCE, &method, path).is_err(), "{path}");
        }
    }

    #[test]
    fn probes_are_answered_where_models_are_run_and_where_they_are_managed() {
        let of_model = |version| Route::ModelReady {
            model: "m",
            version,
        };
        for surface in [INFERENCE, MANAGEMENT, ALL] {
            for (path, route) in [
                ("/v2/health/live", Route::Live),
                ("/v2/health/ready/", Route::ServerReady),
                ("/v2/models/m/ready", of_model(None)),
                ("/v2/models/m/versions/1.0/ready", of_model(Some("1.0"))),
            ] {
                for method in [Method::GET, Method::HEAD] {
                    assert_eq!(find(surface, &method, path).unwrap(), route, "{path}");
                }
                let posted = find(surface, &Method::POST, path);
                assert!(matches!(posted, Err(RestError::NotAllowed)), "{path}");
                assert!(find(METRICS, &Method::GET, path).is_err(), "{path}");
            }
        }
        for path in [
            "/v2/health",
            "/v2/health/other",
            "/v2/models/m/versions/ready",
            "/v2/models/m/1.0/ready",
            "/v2/models/m/versions/1/0/ready",
        ] {
            assert!(find(ALL, &Method::GET, path).is_err(), "{path}");
        }
    }

    #[test]
    fn wrong_methods_and_paths_are_told_apart() {
        let not_allowed =
            |method, path| matches!(find(MANAGEMENT, &method, path), Err(RestError::NotAllowed));
        assert!(not_allowed(Method::PATCH, "/models"));
        assert!(not_allowed(Method::POST, "/models/m"));
        assert!(not_allowed(Method::GET, "/models/m/1/set-default"));
        assert!(not_allowed(Method::GET, "/"));
        for path in [
            "/models/m/1/other",
            "/models/m/1/set-default/x",
            "/ping",
            "/x/y/z/set-default",
        ] {
            let found = find(MANAGEMENT, &Method::PUT, path);
            assert!(matches!(found, Err(RestError::NoSuchRoute)), "{path}");
        }
    }

    #[test]
    fn metrics_stand_on_their_own_listener_and_on_one_of_all() {
        assert_eq!(
            find(METRICS, &Method::POST, "/metrics/x").unwrap(),
            Route::Metrics
        );
        assert_eq!(find(ALL, &Method::GET, "/metrics").unwrap(), Route::Metrics);
        assert!(find(METRICS, &Method::GET, "/metricsx").is_err());
        assert!(find(MANAGEMENT, &Method::GET, "/metrics").is_err());
        assert!(find(METRICS, &Method::GET, "/ping").is_err());
    }
}
