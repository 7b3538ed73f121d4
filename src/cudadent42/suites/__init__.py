"""Suites: what to measure, as TOML files. ``loader`` reads them."""
