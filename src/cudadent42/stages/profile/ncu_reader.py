"""Reads a report through NVIDIA's Python interface, in a process of its own.

    python ncu_reader.py INTERFACE_FOLDER REPORT < names > launches.json

The interface is binary code that ends the process where the libraries of PyTorch are loaded beside it, so this file
imports nothing but the standard library. ``names`` has a metric's name on each line.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from typing import Any


def main(interface: str, report: str) -> None:
    sys.path.insert(0, interface)
    context = importlib.import_module("ncu_report").load_report(report)
    names = sys.stdin.read().split()
    ranges = [context.range_by_idx(index) for index in range(context.num_ranges())]
    actions = [one.action_by_idx(index) for one in ranges for index in range(one.num_actions())]
    json.dump(
        [{"kernel": action.name(), "metrics": _metrics(action, names)} for action in actions], sys.stdout
    )


def _metrics(action: Any, names: list[str]) -> dict[str, tuple[float | None, str]]:
    """Value (None for what is no number) and unit of the metrics that there are."""
    metrics: dict[str, tuple[float | None, str]] = {}
    for name in names:
        metric = action.metric_by_name(name)
        if metric is not None:
            value = metric.value()
            number = isinstance(value, (int, float)) and math.isfinite(value)
            metrics[name] = (float(value) if number else None, metric.unit() or "")
    return metrics


if __name__ == "__main__":
    main(*sys.argv[1:])
