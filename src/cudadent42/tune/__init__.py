"""Choosing a configuration of a kernel from many: claim, race, confirm, install. docs/tuning.md says how."""
