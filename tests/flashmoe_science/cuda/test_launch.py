"""Launches with any number of addresses, up to the driver's door."""

from __future__ import annotations

import ctypes
import gc
import struct
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe_science.cuda import launch as module
from flashmoe_science.cuda.launch import Launcher, addressed


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[ctypes.c_void_p]:
    """The functions that were launched; the driver's own function takes them here."""
    made: list[ctypes.c_void_p] = []

    def launch(config: Any, function: ctypes.c_void_p, arguments: Any, extra: None) -> int:
        made.append(function)
        return 0

    monkeypatch.setattr(module, "library", lambda: SimpleNamespace(cuLaunchKernelEx=launch))
    return made


@pytest.mark.parametrize("count", [1, 4, 5, 6, 11])
def test_addresses_stand_at_the_head_of_the_argument(count: int, launched: list[ctypes.c_void_p]) -> None:
    kernel: Any = SimpleNamespace(threads_per_block=32, dynamic_shared_bytes=0)
    function = ctypes.c_void_p(1)
    launcher = Launcher(function, (1, 1, 1), kernel, 8 * count + 8)
    struct.pack_into("Q", launcher.buffer, 8 * count, 77)
    addresses = [1 << (20 + index) for index in range(count)]
    addressed(launcher, struct.Struct(f"{count}Q"))(*addresses, 0)
    assert struct.unpack_from(f"{count + 1}Q", launcher.buffer) == (*addresses, 77)
    assert launched == [function]


def test_what_launches_keeps_the_argument_without_the_launcher(launched: list[ctypes.c_void_p]) -> None:
    kernel: Any = SimpleNamespace(threads_per_block=32, dynamic_shared_bytes=0)
    launcher = Launcher(ctypes.c_void_p(1), (1, 1, 1), kernel, 8)
    again, argument = launcher.again, weakref.ref(launcher.buffer)
    del launcher
    gc.collect()
    assert argument() is not None
    assert again() == 0
    del again
    gc.collect()
    assert argument() is None
