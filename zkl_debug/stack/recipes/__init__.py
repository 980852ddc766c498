"""Recipe rules: what a NeMo-RL recipe must say for zero train / generation mismatch, as data, and what judges it."""
