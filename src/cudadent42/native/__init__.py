"""Kernels of a user's own as bare source files.

A ``.cu`` or ``.cpp`` with the C ABI of ``cudadent42/attention.h``, and a TOML file that says how to compile and launch
it (docs/your-own-kernel.md). Nothing of either is evaluated.
"""
