//! How many threads a forward pass may use.

/// Sets the number of threads for operators called from the current thread.
///
/// OpenMP keeps this number per thread, so every worker sets it for itself and before its first
/// operator: a fresh thread takes all cores otherwise, and workers then spin against each other
/// (600 to 800 ms were seen on a forward of 40). It works before `import torch`, because the
/// plugin and Python share one libtorch.
///
/// The number of inter-operator threads stays untouched on purpose: torch accepts it once per
/// process, and a handler that sets it itself would fail to load if we had been there before.
pub(crate) fn use_threads(intra_op_threads: u32) {
    if let Ok(count) = i32::try_from(intra_op_threads)
        && count > 0
    {
        tch::set_num_threads(count);
    }
}
