"""What a machine is told that lacks a protection, word by word; ``./test.sh --update-snapshots`` writes it again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cudadent42.base.errors import MachineNotReadyError
from cudadent42.model.sandbox import Layer, LayerState, Protection, SandboxReport
from cudadent42.sandbox.launch import required

NOTHING = SandboxReport(tuple(LayerState(layer, False, "Operation not permitted") for layer in Layer))


@pytest.mark.parametrize("protection", Protection, ids=lambda each: each.value)
def test_words_where_one_is_missing(protection: Protection, snapshot: Callable[[str, str], None]) -> None:
    with pytest.raises(MachineNotReadyError) as error:
        required(NOTHING, [each for each in Protection if each is not protection])
    snapshot(f"sandbox/no-{protection.value}", f"{error.value}\nexit code {error.value.exit_code.value}\n")
