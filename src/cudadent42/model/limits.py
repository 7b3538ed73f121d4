"""Names of what a machine does at most, among ``Results.peaks``."""

from __future__ import annotations

RATE_LIMIT = "limit_gflops"
"""Operations of whatever dtype, in 1e9 per second of what the run's timer counts."""

BANDWIDTH_LIMIT = "limit_gbps"
"""Bytes from and to memory, in 1e9 per second."""

CACHE = "cache_bytes"
"""What the last-level cache holds."""
