"""zkl-debug: names the first layer and operator where training and generation log-probs stop being bitwise equal."""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Load ``capture`` and ``diff`` on first use, so that importing the package costs nothing."""
    if name in ("capture", "diff", "viz"):
        import importlib

        return importlib.import_module(f"zkl_debug.{name}")
    raise AttributeError(f"module 'zkl_debug' has no attribute {name!r}")
