"""The stages in order. The one place that knows the order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from flashmoe_science.errors import DeviceError

from cudadent42 import implementations, report, runs, worker
from cudadent42.bench.compare import compare
from cudadent42.build import build_for
from cudadent42.errors import (
    BuildFailedError,
    ExitCode,
    LabError,
    MachineNotReadyError,
    UsageError,
)
from cudadent42.events import BlockMeasured, Event, Message, Progress, Skipped, WorkerLost
from cudadent42.plan import Choices, make_plan
from cudadent42.preflight.runner import chosen_device, gather, inspect
from cudadent42.preflight.text import failures
from cudadent42.progress import Observer
from cudadent42.records import BenchReport, BuildReport, MachineReport, Plan, Results, VerifyReport
from cudadent42.source import revision
