"""Two states of one package in one process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import repositories as r
import torch

import flashmoe_science
from cudadent42.base.errors import UsageError
from cudadent42.flows.race import name_versions
from cudadent42.model.implementations import UnsupportedCaseError
from cudadent42.model.records import Version
from cudadent42.operations import numerics
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.plan import Choices, make_plan
from cudadent42.registry import registry
from cudadent42.versions import build
from cudadent42.versions.sources import export
from cudadent42.versions.version import implementation, tolerant
from flashmoe_science.jit import nvrtc
from flashmoe_science.jit.nvrtc import CudaKernel

CASE = AttentionCase("one", "fp32", 1, 1, 1, 4, 4, 8)

PACKAGE = {
    "__init__.py": """
from flashmoe_science.state import calls

def __getattr__(name):
    if name == "flash_attention":
        from flashmoe_science.lazy import flash_attention
        return flash_attention
    raise AttributeError(name)
""",
    "state.py": "calls = []\n",
    "errors.py": "class InputError(ValueError): ...\n",
    "lazy.py": """
import importlib
import flashmoe_science.state
from flashmoe_science import calls
from flashmoe_science.errors import InputError

def flash_attention(query, key, value, *, causal=False, softmax_scale=None):
    if query.shape[-1] > 64:
        raise InputError("too wide")
    calls.append(1)
    assert importlib.import_module("flashmoe_science.state").calls is flashmoe_science.state.calls
    return torch.ops.flashmoe.fill(query)

import torch
@torch.library.custom_op("flashmoe::fill", mutates_args=())
def fill(query: torch.Tensor) -> torch.Tensor:
    return torch.full_like(query, {value} + len(calls))
""",
}


def versions(tmp_path: Path, *values: str) -> dict[str, Version]:
    exported = []
    for number, value in enumerate(values):
        files = {name: text.replace("{value}", value) for name, text in PACKAGE.items()}
        exported.append(export(str(r.package(tmp_path / f"tree{number}-{value}", files))))
    return name_versions(*exported)


def value_of(name: str, by_name: dict[str, Version], case: AttentionCase = CASE) -> float:
    loaded = implementation(name, "attention", by_name)
    call = loaded.prepare(case, numerics(case).input_sets(case, 0, 1, "cpu")[0])
    return float(call().flatten()[0])


def test_each_has_its_own_modules_state_and_operators(tmp_path: Path) -> None:
    by_name = versions(tmp_path, "10", "20")
    first, second = by_name
    assert [value_of(first, by_name), value_of(second, by_name), value_of(first, by_name)] == [
        11.0,
        21.0,
        12.0,
    ]
    assert "flashmoe_science.lazy" not in sys.modules


def test_a_tree_against_itself_has_two_copies(tmp_path: Path) -> None:
    by_name = versions(tmp_path, "30", "30")
    first, second = by_name
    assert second == first.replace("tree0-30", "tree1-30") or second.endswith("-again")
    assert [value_of(first, by_name), value_of(first, by_name), value_of(second, by_name)] == [
        31.0,
        32.0,
        31.0,
    ]


def test_a_case_that_a_version_does_not_do_is_not_done(tmp_path: Path) -> None:
    by_name = versions(tmp_path, "40", "50")
    wide = AttentionCase("wide", "fp32", 1, 1, 1, 4, 4, 128)
    with pytest.raises(UnsupportedCaseError, match="too wide"):
        value_of(next(iter(by_name)), by_name, wide)


def test_operators_whose_namespace_is_computed_are_refused_rather_than_mixed_up(tmp_path: Path) -> None:
    def files(value: int) -> dict[str, str]:
        return {
            "errors.py": "",
            "__init__.py": f"""
import torch
NAMESPACE = "computed_" + "name"
library = torch.library.Library(NAMESPACE, "DEF")
def flash_attention(query, key, value, *, causal, softmax_scale):
    return query + {value}
""",
        }

    by_name = name_versions(
        *(export(str(r.package(tmp_path / f"computed{value}", files(value)))) for value in (1, 2))
    )
    first, second = by_name
    implementation(first, "attention", by_name)
    with pytest.raises(UsageError, match="register operators of torch in the namespace 'computed_name'"):
        implementation(second, "attention", by_name)


def test_a_file_of_somebody_else_s_tree_and_its_neighbours(tmp_path: Path) -> None:
    root = r.repository(tmp_path / "repo")
    r.write_kernel(root, offset="7.0")
    r.commit(root, "Another")
    by_name = name_versions(*(export(each, root, r.ENTRY) for each in ("HEAD~1", "HEAD")))
    case = AttentionCase("one", "fp32", 1, 1, 1, 16, 16, 32)
    old, new = (value_of(name, by_name, case) for name in by_name)
    assert new == pytest.approx(old + 7.0, abs=1e-4)
    assert "helper" not in sys.modules


def test_a_tree_that_does_not_import_says_so(tmp_path: Path) -> None:
    root = r.repository(tmp_path / "repo")
    r.write_kernel(root, extra="import not_there_at_all")
    by_name = name_versions(*(export(each, root, r.ENTRY) for each in ("HEAD", "WORKTREE")))
    with pytest.raises(UsageError, match=r"mine of WORKTREE failed on import: ModuleNotFoundError"):
        implementation(list(by_name)[1], "attention", by_name)


def test_an_argument_that_an_older_version_lacks() -> None:
    def old(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool) -> bool:
        return causal

    call = tolerant(old, "v1")
    assert call(1, 2, 3, causal=True, softmax_scale=None)
    with pytest.raises(UnsupportedCaseError, match="v1 does not know the argument 'softmax_scale'"):
        call(1, 2, 3, causal=True, softmax_scale=0.5)

    def new(query: object, *, causal: bool, softmax_scale: float | None) -> None: ...

    assert tolerant(new, "v2") is new


def test_names_are_readable_and_differ() -> None:
    commit = "4ea86ede" + 32 * "0"
    named = name_versions(Version("main", commit, "d1"), Version(commit, commit, "d1"))
    assert list(named) == ["main@4ea86ede", "4ea86ede"]
    twice = name_versions(Version("HEAD", commit, "d1"), Version("HEAD", commit, "d1"))
    assert list(twice) == ["HEAD@4ea86ede", "HEAD@4ea86ede-again"]
    folder = name_versions(Version("my tree!", "", "abcdef0123"), Version("WORKTREE", "", "abcdef0123"))
    assert list(folder) == ["my-tree@abcdef01", "WORKTREE@abcdef01"]


def test_a_version_says_which_of_its_cuda_kernels_a_race_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `flashmoe_science.cuda.kernels`, which a tree has for this."""
    plan = replace(make_plan(Choices(suite="small"), "cpu", registry), device="cuda")
    compiled: list[CudaKernel] = []
    monkeypatch.setattr(build, "_architecture", lambda plan: "sm_80")
    monkeypatch.setattr(nvrtc, "compile_kernel", lambda kernel, cache: compiled.append(kernel))
    list(build._builds(flashmoe_science, Version("tree", "", ""), plan))
    assert {kernel.function for kernel in compiled} >= {"attention_small", "attention_portable"}
    assert {kernel.architecture for kernel in compiled} == {"sm_80"}
