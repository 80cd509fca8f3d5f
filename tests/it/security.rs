//! Who may do what, which archives are taken, and what never comes to light: fault kind K2
//! (*public-faults*, SE) and TorchServe's advisories. `docs/security.md` says which test shows what.

mod advisories;
mod names;
mod secrets;
mod tokens;
mod trust;

use serde_json::Value;
use ts_test::{Answer, Running};

/// The keys that a server made itself.
struct Keys {
    inference: String,
    management: String,
    api: String,
}

impl Keys {
    #[track_caller]
    fn of(server: &Running) -> Self {
        let text = fs_err::read(server.folder().join("key_file.json")).unwrap();
        let told: Value = serde_json::from_slice(&text).unwrap();
        let key = |kind: &str| told[kind]["key"].as_str().unwrap().to_owned();
        Self {
            inference: key("inference"),
            management: key("management"),
            api: key("API"),
        }
    }
}

fn bearer(key: &str) -> String {
    format!("Bearer {key}")
}

fn message(answer: &Answer) -> String {
    answer.json()["message"].as_str().unwrap().to_owned()
}
