"""Configurations that were raced on a GPU and found faster than the usual choice: tables, and the look into them.

Tables are written by `cudadent42 tune install` (docs/tuning.md); the user's are asked before those of this package.
"""
