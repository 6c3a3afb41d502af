//! What needs several memory nodes: see `cargo xtask lab`.
