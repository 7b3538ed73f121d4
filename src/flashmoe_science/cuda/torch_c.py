"""PyTorch's functions of C for compiled models, by their addresses, and where a tensor object points to its tensor.

They take a tenth of the time of the same by way of Python, and give a status where that throws. They are looked for
when first needed, tried on tensors, and without them calls are right and slower.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

MOST_DIM = 4
_NUMBERS = {
    "dim": ctypes.c_int64,
    "dtype": ctypes.c_int32,
    "device_type": ctypes.c_int32,
    "device_index": ctypes.c_int32,
}
_POINTERS = ("data_ptr", "strides", "sizes")
_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_WORD = ctypes.sizeof(ctypes.c_void_p)


class TensorFunctions(ctypes.Structure):
    """How an object of the type `torch.Tensor`, of no subclass, is asked in C: of `kernels/host/repeated_call.cpp`.

    Each function takes a tensor and where its answer goes, and gives a status: 0 if there is an answer.
    """

    _fields_ = (
        ("word", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in (*_POINTERS, *_NUMBERS)),
        ("records_gradients", ctypes.c_void_p),
    )
    word: int
    """Which word of 8 bytes of the object has the address of PyTorch's tensor. Where that word lies is what C calls a
    tensor."""


class Plain(ctypes.Structure):
    """What a tensor is like, as far as these say: of the same source."""

    _fields_ = (
        ("dim", ctypes.c_int64),
        *((name, ctypes.c_int64 * MOST_DIM) for name in ("sizes", "strides")),
        *((name, ctypes.c_int32) for name in ("dtype", "device_type", "device_index", "is_integer")),
    )


@functools.cache
def tensor_functions() -> TensorFunctions | None:
    """None where this PyTorch lacks one, or an answer is otherwise than expected."""
    names = {name: f"aoti_torch_get_{name}" for name in (*_POINTERS, *_NUMBERS)}
    names["records_gradients"] = "aoti_torch_grad_mode_is_enabled"
    addresses = {name: _function("torch_cpu", of_c) for name, of_c in names.items()}
    if None in addresses.values():
        return None
    with torch.inference_mode(False), torch.enable_grad():
        base = torch.empty(3, 4, dtype=torch.float32, device="cpu")
        tensors = base, base[1:].t(), base.int(), base.new_empty(5).requires_grad_()
        elsewhere = torch.empty(3, 4, dtype=torch.int32, device="meta")
    if any(type(tensor) is not torch.Tensor for tensor in (*tensors, elsewhere)):
        return None  # a mode makes others
    words = {_word_of_tensor(tensor) for tensor in (*tensors, elsewhere)}
    if len(words) != 1 or None in words:
        return None
    functions = TensorFunctions(word=words.pop(), **addresses)
    if not (
        _says_what_is_recorded(functions) and all(_are_right_for(functions, tensor) for tensor in tensors)
    ):
        return None
    codes = [
        tuple(_answer(functions, name, tensor) for name in ("dtype", "device_type", "device_index"))
        for tensor in (*tensors, elsewhere)
    ]
    # The second and fourth are as the first; the third has another type, the last another device beside.
    (dtype, device, index), *others = codes
    expected = [(dtype, device, index), (codes[2][0], device, index), (dtype, device, index)]
    differ = codes[2][0] != dtype and codes[4][0] == codes[2][0] and codes[4][1] != device
    return functions if others[:3] == expected and differ and index == -1 else None


@functools.cache
def current_stream() -> int | None:
    """Address of a function of (device: int32, where its current stream's raw handle goes), which gives a status; None
    without CUDA."""
    return _function("torch_cuda", "aoti_torch_get_current_cuda_stream")


def plain_like(functions: TensorFunctions, tensor: torch.Tensor) -> Plain | None:
    """What a tensor is like; None for one of a subclass, or of more than `MOST_DIM` dimensions."""
    if type(tensor) is not torch.Tensor or tensor.dim() > MOST_DIM:
        return None
    numbers = {name: _answer(functions, name, tensor) for name in _NUMBERS}
    if None in numbers.values():
        return None
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return Plain(sizes=tensor.shape, strides=tensor.stride(), is_integer=is_integer, **numbers)


def _function(library: str, name: str) -> int | None:
    path = Path(torch.__file__).parent / "lib" / f"lib{library}.so"
    try:
        return ctypes.cast(getattr(ctypes.CDLL(str(path)), name), ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None


def _word_of_tensor(tensor: torch.Tensor) -> int | None:
    """Which word of an object is its tensor's address; None if not just one is."""
    size = type(tensor).__basicsize__ // _WORD
    address = getattr(tensor, "_cdata", None)
    words = list((ctypes.c_size_t * size).from_address(id(tensor)))
    return words.index(address) if words.count(address) == 1 else None


def _ask(functions: TensorFunctions, name: str, tensor: torch.Tensor, answer: Any) -> bool:
    """Whether there is an answer; it goes where `answer` is."""
    in_c = id(tensor) + _WORD * functions.word
    return bool(_CALL(getattr(functions, name))(in_c, ctypes.addressof(answer)) == 0)


def _answer(functions: TensorFunctions, name: str, tensor: torch.Tensor) -> int | None:
    answer = _NUMBERS[name]()
    return answer.value if _ask(functions, name, tensor, answer) else None


def _says_what_is_recorded(functions: TensorFunctions) -> bool:
    asked = ctypes.CFUNCTYPE(ctypes.c_bool)(functions.records_gradients)
    with torch.no_grad():
        without = asked()
    with torch.enable_grad():
        return bool(asked()) and not without


def _are_right_for(functions: TensorFunctions, tensor: torch.Tensor) -> bool:
    address, sizes, strides = ctypes.c_void_p(), *(ctypes.POINTER(ctypes.c_int64)() for _ in range(2))
    answers = {"data_ptr": address, "sizes": sizes, "strides": strides}
    if not all(_ask(functions, name, tensor, answer) for name, answer in answers.items()):
        return False
    dim = _answer(functions, "dim", tensor)
    return (
        dim == tensor.dim()
        and address.value == tensor.data_ptr()
        and tuple(sizes[:dim]) == tensor.shape
        and tuple(strides[:dim]) == tensor.stride()
    )
