//! Continuous batching (*torchserve-contract* 9.3): requests join and leave between steps.
