//! libtorch, behind functions of our own so that its binding can be replaced.

mod pin;
mod threads;

pub(crate) use threads::use_threads;
