"""Tensor maps of keys and values, packed or in pages, in a launch's buffer."""

from __future__ import annotations

import struct
from typing import Any

from flashmoe_science.configs.attention.hopper import SWIZZLE_PANEL
from flashmoe_science.cuda.tensor_map import MAP_BYTES, TensorMap
from flashmoe_science.errors import InputError
from flashmoe_science.varlen.problem import Problem, Tensors

_ALIGNMENT = 16
_ADDRESS = struct.Struct("Q")
_ROW_MAP = struct.Struct("Q 3q i")  # the address, strides in bytes, 16 bytes of a row


class KeyMaps:
    """Of key and value: made anew where a size changed, moved where an address did."""

    def __init__(
        self, buffer: Any, at: int, problem: Problem, box_rows: int, *, read_once: bool = False
    ) -> None:
        """
        Args:
            at: where the buffer has the map of the keys; that of the values is behind it.
            box_rows: rows of a box, which lies in one page.
            read_once: see `TensorMap`.
        """
        self._buffer = buffer
        self._at = at
        self._problem = problem
        self._box = (SWIZZLE_PANEL, box_rows)
        self._read_once = read_once
        self._sizes: list[int] = [-1, -1]
        self._maps: list[TensorMap | None] = [None, None]

    def describe(self, tensors: Tensors) -> None:
        """Raises InputError for a tensor that TMA cannot address."""
        for index, (name, tensor) in enumerate((("key", tensors.key), ("value", tensors.value))):
            map_, size, address = self._maps[index], tensor.shape[0], tensor.data_ptr()
            if size == 0:  # no key of it is read, but a map describes something
                size, address = 1, tensors.output.data_ptr()
            if map_ is None or self._sizes[index] != size:
                map_ = self._maps[index] = self._make(index, size)
                self._sizes[index] = size
            if map_.address != address:
                if address % _ALIGNMENT:
                    raise InputError(misaligned(name))
                map_.move(address)

    def have_addresses_at(self, offset: int) -> bool:
        """Whether each map has its tensor's address there, as it is, so that another may be written over it."""
        return all(map_ is not None and map_.has_address_at(offset) for map_ in self._maps)

    def _make(self, index: int, size: int) -> TensorMap:
        problem = self._problem
        page, token, head = problem.value_strides if index else problem.key_strides
        rows, pages = (problem.page_size, size) if problem.page_size else (size, 1)
        return TensorMap(
            self._buffer,
            self._at + index * MAP_BYTES,
            problem.dtype,
            (problem.value_dim if index else problem.head_dim, rows, problem.num_kv_heads, pages),
            (token if rows > 1 else 0, head if problem.num_kv_heads > 1 else 0, page if pages > 1 else 0),
            self._box,
            read_once=self._read_once,
        )


class KeyRows:
    """Where rows of key and value lie, for a kernel that copies them one by one, in the places of their tensor maps."""

    def __init__(self, buffer: Any, at: int, problem: Problem) -> None:
        """Args: see `KeyMaps`."""
        self._buffer = buffer
        self._offsets = {"key": at, "value": at + MAP_BYTES}
        element = problem.dtype.itemsize
        rows = (problem.key_strides, problem.head_dim), (problem.value_strides, problem.value_dim)
        for offset, (strides, dim) in zip(self._offsets.values(), rows, strict=True):
            in_bytes = (stride * element for stride in strides)
            _ROW_MAP.pack_into(buffer, offset, 0, *in_bytes, dim * element // _ALIGNMENT)

    def describe(self, tensors: Tensors) -> None:
        """Raises InputError for a tensor whose rows cannot be read 16 bytes at a time."""
        for name, offset in self._offsets.items():
            address = getattr(tensors, name).data_ptr()
            if address % _ALIGNMENT:
                raise InputError(misaligned(name))
            _ADDRESS.pack_into(self._buffer, offset, address)


def misaligned(name: str) -> str:
    """The error of a tensor that begins elsewhere than TMA can address."""
    return f"{name} does not start at a multiple of {_ALIGNMENT} bytes (a view at an odd offset); pass {name}.clone()"
