"""Log-prob level: tables of (step, sample, position, token, gen, train, mask), NeMo-RL's metrics, and what they say."""
