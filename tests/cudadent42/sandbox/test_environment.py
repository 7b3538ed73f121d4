"""The environment of a sandboxed process: an allow list, which no secret passes."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudadent42.sandbox.environment import cleaned, private_places


@pytest.mark.parametrize(
    "name",
    [
        "AWS_SECRET_ACCESS_KEY",
        "GITHUB_TOKEN",
        "HF_TOKEN",
        "SSH_AUTH_SOCK",
        "CUDADENT42_LEDGER",
        "CUDA_API_KEY",
        "TORCH_HUB_PASSWORD",
        "PYTHON_KEYRING_CREDENTIALS",
        "XDG_RUNTIME_DIR",
        "DBUS_SESSION_BUS_ADDRESS",
        "HOME",
        "PIP_INDEX_URL",
    ],
)
def test_what_is_no_business_of_a_candidate_is_left_out(name: str) -> None:
    assert cleaned({name: "value"}) == {}


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "LC_ALL",
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "ATEN_CPU_CAPABILITY",
        "FLASHMOE_CPU_ISA",
        "CUDADENT42_WORKER",
        "LD_PRELOAD",
        "PYTORCH_ALLOC_CONF",
    ],
)
def test_what_changes_compiling_and_timing_stays(name: str) -> None:
    assert cleaned({name: "value"}) == {name: "value"}


@given(st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ_", min_size=1, max_size=30))
def test_no_name_with_a_word_of_secrets_stays(name: str) -> None:
    for word in ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "API_KEY"):
        assert cleaned({f"CUDA_{name}_{word}": "value", f"{name}{word}": "value"}) == {}


def test_relative_entries_of_the_search_path_go() -> None:
    entries = ["/absolute", "", ".", "relative", "/other"]
    assert cleaned({"PYTHONPATH": os.pathsep.join(entries)})["PYTHONPATH"] == f"/absolute{os.pathsep}/other"


def test_all_that_is_written_is_led_to_the_scratch_folder() -> None:
    places = private_places("/scratch")
    assert {"HOME", "TMPDIR", "FLASHMOE_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"} <= set(places)
    assert all(path.startswith("/scratch/") for path in places.values())
