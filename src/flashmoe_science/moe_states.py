"""State dicts of models' blocks as `flashmoe_science.MoE` holds them."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.errors import InputError

_PER_EXPERT = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Gate, up and down projections as checkpoints with a tensor for each expert call them: Qwen and OLMoE; Mixtral."""
_GPT_OSS_TRANSPOSED = ("experts.gate_up_proj", "experts.down_proj")
_GPT_OSS_BY_TURNS = ("experts.gate_up_proj", "experts.gate_up_proj_bias")
_SHARED = "shared_experts."
BY_TURNS = "gate_up_rows_by_turns"
"""In the state of a layer whose gate rows and up rows alternate, and in no other's."""


def convert_state(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """In place, before a module loads it.

    Tensors of single experts become those of all. A GPT-OSS block, known by its ``router``, has weights as (experts,
    columns, rows) with gate and up by turns: they are turned, and put in the module's order. Other fused tensors
    without `BY_TURNS` have all gate rows first. Shared experts (DeepSeek-V3) follow the routed ones.
    """
    _join_experts(module, state, prefix)
    _turn_gpt_oss(module, state, prefix)
    _order_rows(module, state, prefix)
    _append_shared(module, state, prefix)


def _join(module: Any, gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """Rows of gate and up, (experts, intermediate, ...) each, in the order of the module's first product."""
    if module.w13_layout == "interleaved":
        return torch.stack((gates, ups), dim=2).flatten(1, 2)
    return torch.cat((gates, ups), dim=1)


def _order_rows(module: Any, state: dict[str, Any], prefix: str) -> None:
    """Fused tensors in the module's order, which they have where they were joined before, and the mark of it."""
    mark = f"{prefix}experts.{BY_TURNS}"
    wanted = getattr(module.experts, BY_TURNS) is not None
    stored = state.pop(mark, None) is not None
    names = [name for name in (f"{prefix}{each}" for each in _GPT_OSS_BY_TURNS) if name in state]
    if not names:
        return
    for name in names:
        rows = state[name]
        if stored and not wanted:
            state[name] = torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)
        elif wanted and not stored:
            state[name] = _join(module, *rows.chunk(2, dim=1))
    _mark(module, state, prefix, state[names[0]])


def _join_experts(module: Any, state: dict[str, Any], prefix: str) -> None:
    for gate, up, down in _PER_EXPERT:
        if f"{prefix}experts.0.{down}.weight" not in state:
            continue
        count = sum(1 for name in state if _is_of_an_expert(name, prefix, down))
        gates, ups, downs = (_take(state, prefix, name, count) for name in (gate, up, down))
        state[f"{prefix}experts.gate_up_proj"] = _join(module, torch.stack(gates), torch.stack(ups))
        state[f"{prefix}experts.down_proj"] = torch.stack(downs)
        _mark(module, state, prefix, downs[0])


def _mark(module: Any, state: dict[str, Any], prefix: str, loaded: torch.Tensor) -> None:
    """Say that the fused tensors have the module's order, where that is by turns.

    On the device of what is loaded: the module itself may be on the meta device, and take the state's tensors.
    """
    if getattr(module.experts, BY_TURNS) is not None:
        state[f"{prefix}experts.{BY_TURNS}"] = torch.ones((), dtype=torch.uint8, device=loaded.device)


def _is_of_an_expert(name: str, prefix: str, projection: str) -> bool:
    return name.startswith(f"{prefix}experts.") and name.endswith(f".{projection}.weight")


def _take(state: dict[str, Any], prefix: str, projection: str, count: int) -> list[torch.Tensor]:
    names = [f"{prefix}experts.{expert}.{projection}.weight" for expert in range(count)]
    missing = [name for name in names if name not in state]
    if missing:
        raise InputError(
            f"the state dict has no {missing[0]}; expected one of each projection for every expert"
        )
    return [state.pop(name) for name in names]


def _turn_gpt_oss(module: Any, state: dict[str, Any], prefix: str) -> None:
    if f"{prefix}router.weight" not in state:
        return
    if module.activation != "swigluoai":
        raise InputError(
            f"the state dict is a GPT-OSS block's; expected activation 'swigluoai', not {module.activation!r}"
        )
    for name in ("weight", "bias"):
        if f"{prefix}router.{name}" in state:
            state[f"{prefix}gate.{name}"] = state.pop(f"{prefix}router.{name}")
    for name in _GPT_OSS_TRANSPOSED:
        if f"{prefix}{name}" in state:
            state[f"{prefix}{name}"] = state[f"{prefix}{name}"].transpose(1, 2).contiguous()
    for name in _GPT_OSS_BY_TURNS:
        if f"{prefix}{name}" in state:
            rows = state[f"{prefix}{name}"]
            state[f"{prefix}{name}"] = _join(module, rows[:, ::2], rows[:, 1::2])
    _mark(module, state, prefix, state[f"{prefix}gate.weight"])


def _append_shared(module: Any, state: dict[str, Any], prefix: str) -> None:
    """A shared block of n times an expert's intermediate size is n experts with a weight of 1 each."""
    names = [f"{prefix}{_SHARED}{projection}.weight" for projection in _PER_EXPERT[0]]
    count = module.shared_experts
    routed_names = [f"{prefix}experts.{name}" for name in ("gate_up_proj", "down_proj")]
    if count == 0 or not all(name in state for name in (*names, *routed_names)):
        return
    gate, up, down = (state.pop(name) for name in names)
    intermediate = module.experts.down_proj.shape[2]
    if gate.shape[0] != count * intermediate:
        raise InputError(
            f"the state dict's shared expert has intermediate size {gate.shape[0]}; expected shared_experts times "
            f"that of an expert, {count} * {intermediate}: give MoE another shared_experts"
        )
    gates, ups = (weight.view(count, -1, weight.shape[1]) for weight in (gate, up))
    first = _join(module, gates, ups)
    second = down.view(down.shape[0], count, -1).transpose(0, 1)
    for name, shared in zip(routed_names, (first, second), strict=True):
        state[name] = torch.cat((state[name], shared.to(state[name])))
