"""Health of a training run: steps that are not finite, rollbacks, replicas that drift apart."""
