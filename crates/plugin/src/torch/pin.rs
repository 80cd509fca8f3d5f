//! The version pin. tch is written against the C++ interface of one torch release, and libtorch
//! keeps none of it stable: another release fails at best with an undefined symbol.
//!
//! Three places know the number: tch's own build, the environment that this crate was built in,
//! and [`ts_host::TORCH_VERSION`], which a host compares with the torch it is about to load. The
//! first two are compared by tch's build script, the last two here. (A host must compare before it
//! opens the plugin: with the wrong torch it cannot be opened.)

/// The torch that this plugin was compiled against.
const BUILT_FOR: &str = env!("TS_BUILT_FOR_TORCH");

const _: () = assert!(
    equal(BUILT_FOR.as_bytes(), ts_host::TORCH_VERSION.as_bytes()),
    "the torch in the build environment is not the one that hosts accept: change \
     `ts_host::TORCH_VERSION` and the version of tch together"
);

const fn equal(left: &[u8], right: &[u8]) -> bool {
    if left.len() != right.len() {
        return false;
    }
    let mut at = 0;
    while at < left.len() {
        if left[at] != right[at] {
            return false;
        }
        at += 1;
    }
    true
}
