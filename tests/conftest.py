"""What the markers mean: a test that needs a GPU, the network or patience is skipped unless asked for."""

from __future__ import annotations

import functools
import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # The runs of tests do not belong into the ledger of whoever starts them; those about the ledger name their own.
    os.environ["CUDADENT42_LEDGER"] = "none"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--net", action="store_true", help="also run the tests that need the network")
    parser.addoption("--slow", action="store_true", help="also run the tests that take more than ten seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for name in ("net", "slow"):
            if item.get_closest_marker(name) and not config.getoption(f"--{name}"):
                item.add_marker(pytest.mark.skip(reason=f"{name} test: give --{name} to run it"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU that torch can use"))


@functools.cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
