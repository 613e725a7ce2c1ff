"""Expert parallelism over replicas: each has some experts, and computes all replicas' rows."""
