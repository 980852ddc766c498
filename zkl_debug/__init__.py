"""zkl-debug: names the first layer and operator where training and generation log-probs stop being bitwise equal."""

__version__ = "0.1.0"
