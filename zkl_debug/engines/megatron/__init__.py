"""Megatron-core 0.19: scoring through the training forward, generation through the dynamic and the static engine."""
