"""PyTorch's functions of C: found, tried before they are used, and left alone where anything is otherwise."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashmoe_science.cuda import torch_c

FUNCTION = torch_c._function
NAMES = [f"aoti_torch_get_{name}" for name in (*torch_c._POINTERS, *torch_c._NUMBERS)]
ANSWER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    for function in (torch_c.tensor_functions, torch_c.current_stream):
        function.cache_clear()
    yield
    for function in (torch_c.tensor_functions, torch_c.current_stream):
        function.cache_clear()


def answering(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[int, Any], int]) -> Any:
    """Puts a function in the place of one of PyTorch's: it answers what that does, and `change` of (status, result)."""
    theirs = ANSWER(FUNCTION("torch_cpu", name) or 0)
    ours = ANSWER(lambda handle, result: change(theirs(handle, result), result))
    address = ctypes.cast(ours, ctypes.c_void_p).value
    monkeypatch.setattr(
        torch_c,
        "_function",
        lambda library, asked: address if asked == name else FUNCTION(library, asked),
    )
    return ours


def further(status: int, result: Any) -> int:
    number = ctypes.cast(result, ctypes.POINTER(ctypes.c_int32))
    number[0] = number[0] + 8
    return status


def the_same(status: int, result: Any) -> int:
    number = ctypes.cast(result, ctypes.POINTER(ctypes.c_int32))
    number[0] = 3
    return status


def test_this_torch_has_them_and_they_answer_for_tensors_of_all_kinds() -> None:
    plain = torch_c.tensor_functions()
    assert plain is not None
    tensors = torch.zeros(2, 3), torch.zeros(4, 5, dtype=torch.int32)[1:, 2:], torch.zeros(6)[::2]
    assert all(torch_c._are_right_for(plain, tensor) for tensor in tensors)


def test_what_tensors_are_like() -> None:
    functions = torch_c.tensor_functions()
    assert functions is not None
    table = torch.zeros(4, 5, dtype=torch.int32)[1:, ::2]
    like = torch_c.likeness_of(functions, table)
    assert like is not None
    assert (like.dim, tuple(like.sizes)[:2], tuple(like.strides)[:2]) == (2, (3, 3), (5, 2))
    assert (like.device_type, like.device_index, like.is_integer) == (0, -1, 1)
    pages = torch_c.likeness_of(functions, torch.zeros(2, 3, 4, 5))
    assert pages is not None
    assert (pages.dim, tuple(pages.sizes), tuple(pages.strides)) == (4, (2, 3, 4, 5), (60, 20, 5, 1))
    assert (pages.dtype == like.dtype, pages.is_integer) == (False, 0)
    others = torch.zeros(1, 1, 1, 1, 1), torch.nn.Parameter(table, False)
    assert [torch_c.likeness_of(functions, other) for other in others] == [None, None]


@pytest.mark.parametrize(
    "change",
    [
        torch._neg_view,
        lambda tensor: torch.complex(tensor, tensor).conj(),
        lambda tensor: torch._efficientzerotensor(3),
        lambda tensor: tensor.to("meta"),
        lambda tensor: torch.nested.nested_tensor([tensor], layout=torch.strided),
        lambda tensor: tensor.to_sparse(),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_dispatch_keys_say_what_kind_of_tensor_it_is(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    functions = torch_c.tensor_functions()
    assert functions is not None
    usual, other = torch.zeros(3), change(torch.zeros(3))
    assert torch_c._word(other, functions.keys_word) != torch_c._word(usual, functions.keys_word)
    assert torch_c._word(torch.ones(4, 5), functions.keys_word) == torch_c._word(usual, functions.keys_word)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_strides_or_memory_have_a_status() -> None:
    plain = torch_c.tensor_functions()
    assert plain is not None
    nested = torch.nested.nested_tensor([torch.zeros(4)] * 3, layout=torch.strided)
    assert not torch_c._are_right_for(plain, nested)
    unreadable = torch.zeros(3)
    torch._C._set_throw_on_mutable_data_ptr(unreadable)  # type: ignore[attr-defined]
    assert not torch_c._are_right_for(plain, unreadable)


def wrong(name: str) -> Callable[[int, Any], int]:
    """Codes are whatever PyTorch says, as long as others have others."""
    return the_same if name.endswith(("dtype", "device_type")) else further


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [wrong, lambda name: lambda status, result: 1], ids=["wrong", "a status"])
def test_functions_that_answer_otherwise_than_the_methods_are_not_used(
    monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[str], Callable[[int, Any], int]]
) -> None:
    kept = answering(monkeypatch, name, lambda status, result: status)
    assert torch_c.tensor_functions() is not None
    torch_c.tensor_functions.cache_clear()
    kept = answering(monkeypatch, name, change(name))
    assert torch_c.tensor_functions() is None
    assert kept


@pytest.mark.parametrize("answer", [True, False])
def test_a_function_that_does_not_know_what_is_recorded(
    monkeypatch: pytest.MonkeyPatch, answer: bool
) -> None:
    ours = ctypes.CFUNCTYPE(ctypes.c_bool)(lambda: answer)
    put = ctypes.cast(ours, ctypes.c_void_p).value
    name = "aoti_torch_grad_mode_is_enabled"
    monkeypatch.setattr(
        torch_c, "_function", lambda library, asked: put if asked == name else FUNCTION(library, asked)
    )
    assert torch_c.tensor_functions() is None


@pytest.mark.parametrize("name", [*NAMES, "aoti_torch_grad_mode_is_enabled"])
def test_a_torch_without_one_of_them(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(
        torch_c, "_function", lambda library, asked: None if asked == name else FUNCTION(library, asked)
    )
    assert torch_c.tensor_functions() is None


def test_libraries_and_functions_that_are_not_there() -> None:
    assert torch_c._function("torch_cpu", "aoti_torch_get_nothing") is None
    assert torch_c._function("torch_nowhere", "aoti_torch_get_data_ptr") is None


@pytest.mark.parametrize("asked", ["_word_of_tensor", "_word_of_keys"])
def test_objects_that_do_not_have_an_address_or_keys_in_one_word(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    for words in ([None, 2, 2, 2, 2], [2, 2, 3, 2, 2], [None] * 5):
        answers = iter(words)
        monkeypatch.setattr(torch_c, asked, lambda tensor, answers=answers: next(answers))
        torch_c.tensor_functions.cache_clear()
        assert torch_c.tensor_functions() is None


def test_an_address_that_is_in_two_words_is_not_told() -> None:
    one = torch.zeros(3)
    assert torch_c._word_of_tensor(one) is not None
    words = (ctypes.c_size_t * (torch.Tensor.__basicsize__ // 8)).from_address(id(one))
    free = next(index for index in range(len(words) - 1, 0, -1) if words[index] == 0)
    words[free] = one._cdata
    try:
        assert torch_c._word_of_tensor(one) is None
    finally:
        words[free] = 0


@pytest.mark.parametrize("missing", ["_cdata", "_dispatch_keys", "raw_repr"])
def test_a_torch_without_addresses_or_keys(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def without(object: Any, name: str, *default: Any) -> Any:
        return default[0] if name == missing else getattr(object, name, *default)

    monkeypatch.setattr(torch_c, "getattr", without, raising=False)
    assert torch_c.tensor_functions() is None


def test_under_transforms_it_says_none_or_the_same() -> None:
    answers = list[object]()

    def within(tensor: torch.Tensor) -> torch.Tensor:
        torch_c.tensor_functions.cache_clear()
        answers.append(torch_c.tensor_functions())
        return tensor.sum()

    torch.func.vmap(within)(torch.zeros(2, 3))
    torch.func.grad(within)(torch.zeros(3))
    torch.func.functionalize(within)(torch.zeros(3))
    assert len(answers) == 3


def test_where_a_mode_makes_other_tensors_nothing_is_read() -> None:
    with FakeTensorMode():
        assert torch_c.tensor_functions() is None


def test_without_cuda_there_is_no_function_for_streams() -> None:
    assert (torch_c.current_stream() is not None) == (torch.version.cuda is not None)
