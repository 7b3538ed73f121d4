"""The CUDA backend: choose a kernel and its configuration, compile it if need be, launch it.

A folder an operation (`attention`, `moe`, `varlen`); what they share stands beside them. `build` compiles all of them.
"""
