"""The kernel lab: from an unknown machine to a number that can be defended."""

__version__ = "0.1.0"
