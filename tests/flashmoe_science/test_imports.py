"""What the modules of `flashmoe_science` import, lazily or not. ``LAYERS`` is its layout, from the bottom up."""

from __future__ import annotations

from module_graph import arrows, circular, files_of, forbidden, part_of, upward_rows

FILES = files_of("flashmoe_science")

LAYERS = {
    "errors": "",
    "alike": "",
    "jit": "errors",
    "configs": "jit",
    "tuned": "errors",
    "autocast": "",
    "torch_private": "",
    "direct": "torch_private",
    "plans": "",
    "kernels": "",
    "arguments": "errors",
    "gradients": "",
    "moe_arguments": "errors arguments",
    "moe_gradients": "moe_arguments",
    "moe_composition": "moe_arguments moe_gradients",
    "routing_gradients": "moe_arguments",
    "routing_options": "moe_arguments",
    "routing_composition": "arguments moe_arguments",
    "quantized": "errors arguments moe_arguments",
    "varlen.problem": "",
    "varlen.dequantized": "varlen.problem",
    "varlen.sequences": "varlen.problem",
    "varlen.options": "errors arguments",
    "varlen.arguments": "errors arguments varlen.problem varlen.options",
    "varlen.transform": "errors",
    "varlen.append_arguments": "direct varlen.transform",
    "cpu": "errors alike jit configs plans arguments gradients moe_arguments moe_gradients quantized varlen.problem "
    "varlen.dequantized varlen.append_arguments routing_options",
    "cuda": "errors alike torch_private jit configs tuned plans arguments",
    "cuda.attention": "errors jit configs arguments gradients cuda",
    "cuda.moe": "errors jit configs arguments moe_arguments moe_gradients moe_composition routing_options cuda",
    "cuda.varlen": "errors jit configs varlen.problem varlen.dequantized varlen.sequences varlen.append_arguments cuda "
    "cuda.attention",
    "cuda.rotation": "errors jit cuda",
    "cuda.key_lists": "jit cuda",
    "operators.registered": "",
    "operators.flops": "",
    "operators.sharding": "operators.registered",
    "operators.compiled_code": "",
    "operators.recording": "errors torch_private operators.sharding",
    "operators.library": "operators.registered operators.flops operators.compiled_code",
    "varlen.launch": "errors alike torch_private plans arguments varlen.problem varlen.arguments cpu cuda cuda.varlen",
    "varlen.sink_gradients": "errors cuda.attention",
    "varlen.dense_gradients": "errors gradients cpu cuda.attention varlen.sink_gradients",
    "varlen.dense_forward": "errors arguments varlen.arguments varlen.dense_gradients varlen.launch cuda.varlen",
    "operators": "errors torch_private direct arguments gradients moe_arguments moe_gradients routing_gradients "
    "routing_options quantized varlen.arguments varlen.options varlen.launch varlen.dense_gradients "
    "varlen.dense_forward cpu cuda.attention cuda.moe cuda.rotation cuda.key_lists "
    "operators.flops operators.sharding operators.recording operators.library",
    "varlen": "errors autocast torch_private direct arguments varlen.options varlen.arguments varlen.transform "
    "varlen.append_arguments varlen.launch varlen.dense_gradients varlen.dense_forward cpu cuda.varlen "
    "operators.sharding operators.recording operators",
    "checkpoint": "operators.registered",
    "autograd": "errors torch_private gradients operators",
    "moe_autograd": "errors torch_private moe_arguments moe_gradients operators",
    "attention": "errors autocast torch_private direct arguments gradients cpu cuda.attention operators.sharding "
    "operators autograd varlen",
    "moe": "errors arguments autocast torch_private direct moe_arguments moe_gradients quantized cpu cuda.moe "
    "operators.sharding operators moe_autograd",
    "moe_capacity": "errors arguments",
    "moe_states": "errors",
    "router_losses": "errors torch_private arguments direct moe_arguments routing_gradients routing_options cpu "
    "cuda.moe moe moe_capacity",
    "moe_layer": "errors autocast arguments moe_arguments moe moe_capacity moe_states router_losses",
    "explanation": "errors jit arguments moe_arguments quantized varlen.problem varlen.options varlen.arguments "
    "varlen.dense_forward cpu cuda cuda.attention cuda.moe cuda.varlen varlen attention moe",
    "takeover": "errors autocast torch_private direct arguments gradients moe_arguments cpu cuda cuda.attention "
    "cuda.moe cuda.key_lists operators attention moe",
    "huggingface": "errors jit torch_private direct arguments moe_arguments routing_composition cuda.rotation "
    "operators moe takeover varlen",
    "adapters": "errors arguments attention varlen.transform varlen",
    "flashmoe_science": "errors varlen attention moe moe_capacity moe_layer router_losses explanation takeover "
    "huggingface",
}
"""Which part may import which: a row names earlier rows only. A part is a package or a module of it, and all of the
package that has no row of its own.

Each backend knows what an operation is (`arguments`, `gradients`, ``varlen.problem``), and no operator or public
function.
"""


def test_rows_name_earlier_rows_only() -> None:
    """So there is no circle of parts."""
    assert upward_rows(LAYERS) == []


def test_nothing_is_imported_but_what_its_row_allows() -> None:
    assert forbidden(arrows(FILES), LAYERS) == {}


def test_every_part_has_a_row_and_every_row_a_use() -> None:
    assert {part_of(module, LAYERS) for module in FILES} == set(LAYERS)
    used: dict[str, set[str]] = {}
    for module, others in arrows(FILES).items():
        used.setdefault(part_of(module, LAYERS), set()).update(part_of(other, LAYERS) for other in others)
    idle = {name: set(row.split()) - used[name] for name, row in LAYERS.items()}
    assert {name: rest for name, rest in idle.items() if rest} == {}


def test_no_module_needs_itself() -> None:
    assert circular(arrows(FILES)) == []
