//! Asynchronous communication with workers (*torchserve-contract* 9.7).
