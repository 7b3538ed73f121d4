"""PyTorch's functions of C for compiled models, by their addresses, and where a tensor object points to its tensor.

They take less time than Python's way, and give a status where that throws (PyTorch 2.11 prints why, too). They are
looked for when first needed, tried on tensors, and without them calls are right and slower.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MOST_DIM = 4
_CODES = ("dtype", "device_type", "device_index")
_NUMBERS = {"dim": ctypes.c_int64, **dict.fromkeys(_CODES, ctypes.c_int32)}
_POINTERS = ("data_ptr", "strides", "sizes")
_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_WORD = ctypes.sizeof(ctypes.c_void_p)
_MOST_WORDS = 23
"""Of PyTorch's tensor, among which its dispatch keys are looked for: in 2.11 they are the last of 23, in 2.13 of 22."""


class TensorFunctions(ctypes.Structure):
    """How an object of the type `torch.Tensor`, of no subclass, is asked in C: of `kernels/host/repeated_call.cpp`.

    Each function but the last takes a tensor and where its answer goes, and gives a status: 0 if there is an answer.
    """

    _fields_ = (
        ("word", ctypes.c_int64),
        ("keys_word", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in (*_POINTERS, *_NUMBERS)),
        ("records_gradients", ctypes.c_void_p),
    )
    word: int
    """Which word of the object has the address of PyTorch's tensor. Where it lies is what C calls a tensor."""
    keys_word: int
    """Which word of PyTorch's tensor has its dispatch keys."""


class Likeness(ctypes.Structure):
    """All that a tensor is like but whether it requires a gradient: of the same source."""

    _fields_ = (
        ("dim", ctypes.c_int64),
        *((name, ctypes.c_int64 * MOST_DIM) for name in ("sizes", "strides")),
        ("keys", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in (*_CODES, "is_integer")),
    )


@functools.cache
def tensor_functions() -> TensorFunctions | None:
    """None where this PyTorch lacks one, or an answer is otherwise than expected."""
    names = {name: f"aoti_torch_get_{name}" for name in (*_POINTERS, *_NUMBERS)}
    names["records_gradients"] = "aoti_torch_grad_mode_is_enabled"
    addresses = {name: _function("torch_cpu", of_c) for name, of_c in names.items()}
    tensors = _tensors_to_try()
    # Where a mode is on, others are made.
    if None in addresses.values() or any(type(tensor) is not torch.Tensor for tensor in tensors):
        return None
    word = _same_of_all(_word_of_tensor, tensors)
    keys_word = None if word is None else _same_of_all(_word_of_keys, tensors)
    if word is None or keys_word is None:
        return None
    functions = TensorFunctions(word=word, keys_word=keys_word, **addresses)
    are_right = _says_what_is_recorded(functions) and all(
        _are_right_for(functions, tensor) for tensor in tensors
    )
    return functions if are_right and _tell_apart(functions, tensors) else None


def _tensors_to_try() -> tuple[torch.Tensor, ...]:
    """Of several dtypes, dispatch keys and devices."""
    with torch.inference_mode(False), torch.enable_grad():
        return (
            torch.empty(3, 4, dtype=torch.float32, device="cpu"),
            torch.empty(4, 3, dtype=torch.int32, device="cpu")[1:].t(),
            torch.empty(5, dtype=torch.float32, device="cpu", requires_grad=True),
            torch.empty(3, dtype=torch.complex64, device="cpu").conj(),
            torch.empty(3, 4, dtype=torch.int32, device="meta"),
        )


@functools.cache
def current_stream() -> int | None:
    """Address of a function (device: int32, where its current stream's handle goes): its status. None without CUDA."""
    return _function("torch_cuda", "aoti_torch_get_current_cuda_stream")


def likeness_of(functions: TensorFunctions, tensor: torch.Tensor) -> Likeness | None:
    """None for a tensor of a subclass, or of more than `MOST_DIM` dimensions."""
    if type(tensor) is not torch.Tensor or tensor.dim() > MOST_DIM:
        return None
    numbers = {name: _answer(functions, name, tensor) for name in _NUMBERS}
    if None in numbers.values():
        return None
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return Likeness(
        sizes=tensor.shape,
        strides=tensor.stride(),
        keys=_word(tensor, functions.keys_word),
        is_integer=is_integer,
        **numbers,
    )


def _function(library: str, name: str) -> int | None:
    path = Path(torch.__file__).parent / "lib" / f"lib{library}.so"
    try:
        return ctypes.cast(getattr(ctypes.CDLL(str(path)), name), ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None


def _same_of_all(
    word_of: Callable[[torch.Tensor], int | None], tensors: tuple[torch.Tensor, ...]
) -> int | None:
    words = {word_of(tensor) for tensor in tensors}
    return words.pop() if len(words) == 1 else None


def _word_of_tensor(tensor: torch.Tensor) -> int | None:
    """Which word of an object is its tensor's address; None if not just one is."""
    size = type(tensor).__basicsize__ // _WORD
    address, words = getattr(tensor, "_cdata", None), list((ctypes.c_size_t * size).from_address(id(tensor)))
    return words.index(address) if words.count(address) == 1 else None


def _word_of_keys(tensor: torch.Tensor) -> int | None:
    """Which word of PyTorch's tensor is its dispatch keys: the first that is. Nothing behind it is read."""
    keys_of = getattr(torch._C, "_dispatch_keys", None)
    keys = None if keys_of is None else getattr(keys_of(tensor), "raw_repr", lambda: None)()
    return next((word for word in range(_MOST_WORDS) if _word(tensor, word) == keys), None)


def _word(tensor: torch.Tensor, word: int) -> int:
    """Of PyTorch's tensor."""
    return ctypes.c_uint64.from_address(tensor._cdata + _WORD * word).value


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
        and (address.value or 0) == tensor.data_ptr()
        and tuple(sizes[:dim]) == tensor.shape
        and tuple(strides[:dim]) == tensor.stride()
    )


def _tell_apart(functions: TensorFunctions, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether those of `_tensors_to_try` have the same codes where they have the same dtypes and devices."""
    floats, integers, more_floats, _, elsewhere = (
        [_answer(functions, name, tensor) for name in _CODES] for tensor in tensors
    )
    return (
        floats == more_floats
        and floats[1:] == integers[1:]
        and floats[2] == -1
        and integers[0] == elsewhere[0] != floats[0]
        and elsewhere[1] != floats[1]
    )
