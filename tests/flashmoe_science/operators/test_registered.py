"""Every operator says what PyTorch asks about it, and no list beside its own module has to name it."""

from __future__ import annotations

import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import flop_registry

import flashmoe_science.operators
from flashmoe_science.checkpoint import save_list
from flashmoe_science.operators.library import LIBRARY
from flashmoe_science.operators.registered import Operator, operators

IN_A_PROCESS_OF_ITS_OWN = """
import sys
import flashmoe_science.operators
from flashmoe_science.operators.registered import operators
print(*(each.name for each in operators()))
print(*(name.rpartition(".")[2] for name in sys.modules if name.startswith("flashmoe_science.operators.")))
"""
SHARDED = {
    *("flash_attention_forward", "flash_attention_backward", "fused_moe", "fused_moe_training"),
    *("fused_moe_backward", "topk_routing"),
    *("flash_attention_with_options", "flash_attention_with_options_backward"),
}
"""Of docs/compile.md."""


each_operator = pytest.mark.parametrize("operator", operators(), ids=lambda each: each.name)


def test_every_operator_is_registered_and_has_an_overload() -> None:
    defined = {name.partition("::")[2] for name in LIBRARY._op_defs}
    assert len(defined) > 10
    assert [each.name for each in operators()] == sorted(defined)
    assert all(
        each.overload is getattr(torch.ops.flashmoe_science, each.name).default for each in operators()
    )


@each_operator
def test_a_formula_is_what_the_counter_takes_and_else_there_is_a_reason(operator: Operator) -> None:
    counted = operator.overload.overloadpacket in flop_registry
    assert counted == callable(operator.flops)
    assert counted or len(str(operator.flops).split()) > 3


@each_operator
def test_formulas_and_rules_take_the_operators_arguments(operator: Operator) -> None:
    """By position and by name, as PyTorch calls them."""
    arguments = operator.overload._schema.arguments
    given = [each.name for each in arguments if not each.has_default_value()]
    for function in (operator.flops, operator.sharding):
        if callable(function):
            signature = inspect.signature(function)
            signature.bind(*arguments)
            signature.bind(*given, **{each.name: None for each in arguments[len(given) :]})


def test_dtensors_pass_through_what_the_page_says() -> None:
    assert {each.name for each in operators() if each.sharding is not None} == SHARDED


def test_what_is_kept_is_in_the_order_of_names() -> None:
    kept = [each for each in operators() if each.kept]
    assert save_list() == [each.overload for each in kept]
    assert [each.name for each in kept] == sorted(each.name for each in kept)


def test_importing_the_package_imports_each_module_and_defines_each_operator() -> None:
    """As a process does that loads what torch.export saved, and uses nothing else."""
    source = Path(flashmoe_science.operators.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    defined, modules = (line.split() for line in done.stdout.splitlines())
    assert defined == [each.name for each in operators()]
    assert set(modules) == {each.name for each in pkgutil.iter_modules(flashmoe_science.operators.__path__)}
