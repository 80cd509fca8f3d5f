//! The parsers of what clients and operators write, opened to `tests/fuzz`. Nothing is decided
//! here: each function calls those that the server calls, and makes text of what targets compare.

use std::path::Path;
use std::pin::Pin;

use actix_web::dev::Payload;
use actix_web::error::PayloadError;
use actix_web::test::TestRequest;
use actix_web::{FromRequest as _, web};
use bytes::Bytes;
use futures_util::{FutureExt as _, Stream, stream};
use tokio::runtime::Runtime;
pub use ts_types::Part;

use crate::cli::Options;
use crate::rest::body::{self, Intake, Limits};
use crate::rest::query::Parameters;
use crate::rest::torchserve::management;
use crate::settings::{self, Address, DefaultPorts, Environment, Machine, StartupModels};

/// Parameters in order, and what a registration or a scaling makes of them.
pub type Parsed = (Vec<(String, String)>, Vec<Result<String, String>>);

/// Reads a body that arrives in these pieces and splits it into fields, within limits on its bytes
/// and fields. `clock` is what its time-outs would run on; as all of it is there, none is waited
/// for.
///
/// # Errors
/// As for a client.
///
/// # Panics
/// The body is waited for.
pub fn body(
    clock: &Runtime,
    content_type: &str,
    pieces: Vec<Bytes>,
    (bytes, parts): (usize, usize),
) -> Result<Vec<Part>, String> {
    let limits = Limits { bytes, parts };
    let _entered = clock.enter();
    let pieces: Pin<Box<dyn Stream<Item = Result<Bytes, PayloadError>>>> =
        Box::pin(stream::iter(pieces.into_iter().map(Ok)));
    let request = TestRequest::post().to_http_request();
    let read = async {
        let payload = web::Payload::from_request(&request, &mut Payload::from(pieces));
        let payload = payload.await.map_err(|error| error.to_string())?;
        let read = body::collect(&request, payload, &Intake::alone(limits)).await;
        let body = read.map_err(|error| error.to_string())?;
        let split = body::parts(content_type, body, limits).await;
        split.map_err(|error| error.to_string())
    };
    read.now_or_never().expect("nothing of it is waited for")
}

/// Reads a query string.
pub fn query(text: &str) -> Parsed {
    used(Parameters::of_query(text))
}

/// Reads the JSON body of a registration.
///
/// # Errors
/// As for a client.
pub fn json(body: &[u8]) -> Result<Parsed, String> {
    let parameters = Parameters::of_json(body);
    parameters.map(used).map_err(|error| error.to_string())
}

fn used(parameters: Parameters) -> Parsed {
    let registration = management::registration(&parameters);
    let scaling = management::scaling(&parameters);
    let uses = vec![
        registration
            .map(|mut it| {
                // Of a query alone: nothing of a URL in a body gets lost.
                it.stray_parameters.clear();
                format!("{it:?}")
            })
            .map_err(|e| e.to_string()),
        scaling
            .map(|it| format!("{it:?}"))
            .map_err(|e| e.to_string()),
    ];
    (parameters.into_pairs(), uses)
}

/// Reads the text of a configuration file: what it has, and how many of its lines are malformed.
pub fn properties(text: &str) -> (Vec<(String, String)>, usize) {
    let mut pairs = Vec::new();
    let mut malformed = 0;
    for entry in settings::parse_properties(text) {
        match entry {
            Ok(entry) => pairs.push((entry.key, entry.value)),
            Err(_) => malformed += 1,
        }
    }
    (pairs, malformed)
}

/// Puts variables into a value.
///
/// # Errors
/// The variable that is not set.
pub fn substitute(
    value: &str,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<String, String> {
    settings::substitute(value, variable)
}

/// Makes settings of a configuration file, on a machine without devices; gives warnings.
///
/// # Errors
/// Every fault, as at start.
pub fn settings(file: &Path, model_store: &Path) -> Result<Vec<String>, Vec<String>> {
    let options = Options {
        ts_config: Some(file.to_owned()),
        model_store: Some(model_store.to_owned()),
        ..Options::default()
    };
    let machine = Machine {
        cores: 2,
        devices: Vec::new(),
        visible_devices: None,
        executable: "torchserve".into(),
    };
    let told = |faults: Vec<settings::SettingsError>| {
        let told = faults.iter().map(ToString::to_string);
        told.collect::<Vec<String>>()
    };
    let raw = settings::load(&options, &Environment::default());
    settings::resolve(&raw, &machine).map_err(told)?;
    Ok(raw.warnings())
}

/// Reads the `models` property.
///
/// # Errors
/// As at start.
pub fn models(text: &str) -> Result<String, Vec<String>> {
    settings::parse_overrides(text).map(|overrides| format!("{overrides:?}"))
}

/// Reads the models of a snapshot.
///
/// # Errors
/// As at start.
pub fn saved_models(text: &str) -> Result<String, String> {
    crate::snapshots::parse_saved(text).map(|models| format!("{models:?}"))
}

/// Reads the list of models to load at start; gives their names and URLs unless it is all of them.
pub fn startup_models(text: &str) -> Option<Vec<(Option<String>, String)>> {
    match StartupModels::parse(text) {
        StartupModels::All => None,
        StartupModels::Listed(models) => {
            Some(models.into_iter().map(|it| (it.name, it.url)).collect())
        }
    }
}

/// Reads the address of a listener and writes it again.
///
/// # Errors
/// As at start.
pub fn address(text: &str, default_port: u16) -> Result<String, String> {
    let ports = DefaultPorts {
        http: default_port,
        https: default_port,
    };
    Address::parse(text, ports).map(|address| address.to_string())
}
