"""Tensor maps, with a driver that keeps an address where it is told to."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashmoe_science.cuda import tensor_map as module
from flashmoe_science.cuda.tensor_map import MAP_BYTES, TensorMap, address_offset

FIRST, SECOND, THIRD = 0x7F00_0000_1000, 0x7F00_0000_2000, 0x7F00_0000_3000


class Driver:
    """Writes an address, exclusive or'd with a number, behind 40 bytes that say which kind of map it is."""

    def __init__(self, changed: int = 0) -> None:
        self.changed, self.calls = changed, list[str]()

    def encode(self, at: ctypes.c_void_p, dtype: int, rank: int, address: ctypes.c_void_p, *rest: Any) -> int:
        self.calls.append("encode")
        return self._write(at, address)

    def replace(self, at: ctypes.c_void_p, address: ctypes.c_void_p) -> int:
        self.calls.append("replace")
        return self._write(at, address)

    def _write(self, at: ctypes.c_void_p, address: ctypes.c_void_p) -> int:
        assert at.value is not None
        assert address.value is not None
        ctypes.memset(at.value, 7, MAP_BYTES)
        ctypes.c_uint64.from_address(at.value + 40).value = address.value ^ self.changed
        return 0


@pytest.fixture
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver(getattr(request, "param", 0))
    names = {"cuTensorMapEncodeTiled": made.encode, "cuTensorMapReplaceAddress": made.replace}
    monkeypatch.setattr(module, "library", lambda: SimpleNamespace(**names))
    address_offset.cache_clear()
    yield made
    address_offset.cache_clear()


def map_in_a_buffer() -> tuple[TensorMap, ctypes.Array[ctypes.c_char]]:
    """The second of two maps in it."""
    buffer = (ctypes.c_char * (2 * MAP_BYTES))()
    return TensorMap(buffer, MAP_BYTES, torch.bfloat16, (64, 32), (64,), (64, 8)), buffer


def test_an_address_is_written_once_it_is_known_where(driver: Driver) -> None:
    tested, buffer = map_in_a_buffer()
    tested.move(FIRST)
    tested.move(SECOND)
    asked = len(driver.calls)
    before = buffer.raw
    for address in (THIRD, FIRST, THIRD):
        assert tested.address != address  # so that callers who compare it move the map
        tested.move(address)
        assert tested.has_address_at(40)
        head, tail = MAP_BYTES + 40, MAP_BYTES + 48
        assert buffer.raw == before[:head] + struct.pack("Q", address) + before[tail:]
    assert len(driver.calls) == asked


@pytest.mark.parametrize("driver", [0x10], indirect=True)
def test_a_driver_that_keeps_addresses_otherwise_is_asked(driver: Driver) -> None:
    tested, buffer = map_in_a_buffer()
    for address in (FIRST, SECOND, THIRD):
        tested.move(address)
        assert struct.unpack_from("Q", buffer, MAP_BYTES + 40) == (address ^ 0x10,)
        assert tested.address == address
    assert driver.calls.count("replace") == 2
