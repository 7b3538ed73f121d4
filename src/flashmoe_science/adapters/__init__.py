"""The kernels under the names and conventions of other packages, a module each."""
