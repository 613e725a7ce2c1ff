"""Health of a training run: steps that are not finite, replicas that drift apart."""
