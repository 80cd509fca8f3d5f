//! The vocabulary that every layer shares: ids, requests, replies, model specifications and
//! error classes. Plain data: no I/O, no async, no torch, no Python.

mod class;
mod id;
mod reply;
mod request;
mod spec;

pub use class::{Classify, ErrorClass, Invalid, Subject, with_causes};
pub use id::{IdError, ModelName, RequestId, Version};
pub use reply::Reply;
pub use request::{Headers, InferRequest, Part, RequestKind, Urgency};
pub use spec::{
    DeviceType, Gather, HostLimits, Isolation, LevelPolicy, LoadPolicy, ModelLimits,
    ResourceDemand, Runtime, Scheduling, SequencePolicy, SequenceStrategy, TimeoutAction,
    UnknownName,
};
