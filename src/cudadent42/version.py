"""The version of what is installed: that of ``pyproject.toml``."""

__version__ = "0.1.0"
