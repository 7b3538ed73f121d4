"""The process in which kernels are built, verified and timed, and its parent."""
