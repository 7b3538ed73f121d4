"""What the backends share of a mixture of experts' arguments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flashmoe_science
from flashmoe_science.moe_arguments import ACTIVATION_CODES, Activation

KERNELS = Path(flashmoe_science.__file__).parent / "kernels"


def test_the_cpu_numbers_activations_alike() -> None:
    text = (KERNELS / "cpu" / "activation.h").read_text()
    (members,) = re.findall(r"enum Activation : int64_t \{(.*?)\};", text)
    codes = dict(member.split(" = ") for member in members.strip().split(", "))
    assert {name: int(code) for name, code in codes.items()} == {
        activation.name: code for activation, code in ACTIVATION_CODES.items()
    }
    (last_gated,) = re.findall(r"is_gated\(int64_t activation\) \{ return activation <= (\w+); \}", text)
    assert int(codes[last_gated]) == max(ACTIVATION_CODES[each] for each in Activation if each.gated)


@pytest.mark.parametrize("activation", Activation)
def test_a_gated_activation_has_the_number_that_the_cuda_kernels_take_for_one(activation: Activation) -> None:
    text = (KERNELS / "cuda" / "moe" / "activation.cuh").read_text()
    ((first, last),) = re.findall(r"kGated = ACTIVATION >= (\d) && ACTIVATION <= (\d);", text)
    assert (int(first) <= ACTIVATION_CODES[activation] <= int(last)) == activation.gated
    assert re.search(rf"#(?:el)?if .*ACTIVATION == {ACTIVATION_CODES[activation]}\b", text)
