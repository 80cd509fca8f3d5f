//! From a model's description to the backend that runs it, inside the worker's own thread.

use std::sync::Arc;

use ts_host::{Backend, BackendFactory, EchoFactory, Output};
use ts_wire::frame::{BackendKind, LoadFailure, LoadModel};

use crate::python::Session;
use crate::torch;

/// Builds every backend there is.
pub(crate) struct Factory;

impl BackendFactory for Factory {
    fn load(
        &self,
        model: &LoadModel,
        output: &Arc<Output>,
    ) -> Result<Box<dyn Backend>, LoadFailure> {
        match model.backend {
            BackendKind::Python => {
                torch::use_threads(model.intra_op_threads);
                Ok(Box::new(Session::load(model, output)?))
            }
            BackendKind::Echo => EchoFactory.load(model, output),
        }
    }
}
