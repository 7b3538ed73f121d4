"""Tensor maps: what TMA needs to know of a tensor (CUDA driver API, cuTensorMapEncodeTiled)."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable

import torch

from flashmoe_science.cuda.driver import check, library
from flashmoe_science.errors import InputError

MAP_BYTES = 128
_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_INTERLEAVE_NONE = 0
_SWIZZLE_128B = 3
_L2_PROMOTION_256B = 3
_L2_PROMOTION_NONE = 0
_OUT_OF_BOUNDS_ZERO = 0
_ADDRESS = struct.Struct("Q")


class TensorMap:
    """The map of a tensor of 16-bit elements and 2 to 5 dimensions, written into a launch's argument buffer.

    Boxes have the 128-byte swizzle; what lies out of bounds reads as zero. Encoded at the first `move`, re-addressed at
    later ones: where the address's place in a map is known, by writing it there without a frame of Python. A layer's
    tensors are others than those of the layer before, so nearly every call moves each map.
    """

    __slots__ = (
        "_at",
        "_box",
        "_dtype",
        "_encoded",
        "_keep",
        "_offset",
        "_place",
        "_promotion",
        "_rank",
        "_sizes",
        "_strides",
        "address",
        "move",
    )

    def __init__(
        self,
        buffer: ctypes.Array[ctypes.c_char],
        offset: int,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        *,
        read_once: bool = False,
    ) -> None:
        """
        Args:
            sizes: elements, fastest dimension first.
            strides: of the dimensions after the first, in elements; 0 for a dimension of size 1.
            box: elements of the first dimensions; 1 of the others.
            read_once: so that it does not pay that L2 fetches 256 bytes where 128 are asked for.
        """
        self.address = 0
        """Of the tensor that the map describes now; 0 before the first `move`. Negative where it is not kept, as
        writing one takes less than comparing it.
        """
        self.move: Callable[[int], object] = self._ask_driver
        """Describe the tensor of this shape at an address. Raises InputError where the driver refuses the shape, the
        strides or the alignment.
        """
        self._keep, self._offset = buffer, offset
        self._place = -1
        """Of the address in the map; negative: not known."""
        self._at = ctypes.c_void_p(ctypes.addressof(buffer) + offset)
        self._dtype = _TYPES[dtype]
        rank = len(sizes)
        self._rank = rank
        self._sizes = (ctypes.c_uint64 * rank)(*sizes)
        # A dimension of size 1 is never stepped along, but its stride has to be a legal one.
        row_bytes = -(-sizes[0] * dtype.itemsize // 16) * 16
        self._strides = (ctypes.c_uint64 * (rank - 1))(*(s * dtype.itemsize or row_bytes for s in strides))
        self._box = (ctypes.c_uint32 * rank)(*box, *(1,) * (rank - len(box)))
        self._promotion = _L2_PROMOTION_NONE if read_once else _L2_PROMOTION_256B
        self._encoded = False

    def _ask_driver(self, address: int) -> None:
        driver = library()
        if self._encoded:
            status = driver.cuTensorMapReplaceAddress(self._at, ctypes.c_void_p(address))
            check(driver, status, "cuTensorMapReplaceAddress")
            self.address = address
            offset = address_offset()
            if offset is not None and self.has_address_at(offset):
                self._place, self.address = offset, -1
                self.move = functools.partial(_ADDRESS.pack_into, self._keep, self._offset + offset)
        else:
            ones = (ctypes.c_uint32 * self._rank)(*(1,) * self._rank)
            status = driver.cuTensorMapEncodeTiled(
                self._at,
                self._dtype,
                self._rank,
                ctypes.c_void_p(address),
                self._sizes,
                self._strides,
                self._box,
                ones,
                _INTERLEAVE_NONE,
                _SWIZZLE_128B,
                self._promotion,
                _OUT_OF_BOUNDS_ZERO,
            )
            if status != 0:
                raise InputError(
                    f"TMA cannot address sizes {tuple(self._sizes)} with strides of {tuple(self._strides)} bytes "
                    f"(cuTensorMapEncodeTiled: {status}); pass contiguous tensors"
                )
            self._encoded = True
            self.address = address

    def has_address_at(self, offset: int) -> bool:
        """Whether the map has its tensor's address there, as it is, so that another may be written over it."""
        if self._place >= 0:
            return self._place == offset
        return bool(_ADDRESS.unpack_from(self._keep, self._offset + offset) == (self.address,))


@functools.cache
def address_offset() -> int | None:
    """Where in a map the address of its tensor lies, in bytes, so that another can be written there; None if it cannot.

    The format is the driver's own, so two maps are compared that differ in their address alone.
    """
    addresses, maps = (0x7F12_3456_7810, 0x7E21_4365_87F0), []
    for address in addresses:
        storage = ctypes.create_string_buffer(MAP_BYTES + 64)
        buffer = (ctypes.c_char * MAP_BYTES).from_buffer(storage, -ctypes.addressof(storage) % 64)
        TensorMap(buffer, 0, torch.bfloat16, (64, 64), (64,), (64, 8)).move(address)
        maps.append(buffer.raw)
    first, second = (address.to_bytes(8, "little") for address in addresses)
    offset = maps[0].find(first)
    if offset < 0 or offset % 8 or maps[0][:offset] + second + maps[0][offset + 8 :] != maps[1]:
        return None
    return offset
