"""The forward pass of dense tensors with a window, a cap or sinks, by the kernels of `attention_varlen`."""

from __future__ import annotations

import torch

from flashmoe_science.arguments import check_dense
from flashmoe_science.cuda.varlen import dense as cuda
from flashmoe_science.errors import DeviceError, InputError
from flashmoe_science.varlen.arguments import Inputs, check_per_head
from flashmoe_science.varlen.arguments import Options as VarlenOptions
from flashmoe_science.varlen.dense_gradients import Options
from flashmoe_science.varlen.launch import launch


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    options: Options,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output like query, and the log-sum-exp, which may be None where it is not asked for. Arguments were checked.

    Raises:
        DeviceError: no kernel for this device.
    """
    window, softcap, scale = options
    if scale <= 0:
        # The kernels' scale is positive; 0 keeps what infinite products make, NaN.
        query, scale = (-query, -scale) if scale else (query * 0, 1.0)
    if query.is_cuda:
        return cuda.forward(
            query,
            key,
            value,
            sinks,
            window=window,
            softcap=softcap,
            softmax_scale=scale,
            return_lse=return_lse,
        )
    if query.is_cpu:
        return _on_cpu(query, key, value, window, softcap, sinks, scale)
    raise DeviceError(
        f"there is no kernel for {query.device}; expected tensors on cpu or cuda: move them with .to()"
    )


def check_sinks(sinks: object, query: torch.Tensor) -> None:
    """InputError unless sinks are (heads,) float32 on the device of query."""
    check_dense(sinks=sinks)
    assert isinstance(sinks, torch.Tensor)
    if sinks.device != query.device:
        raise InputError(
            f"sinks is on {sinks.device} but query is on {query.device}; expected one device: move it with .to()"
        )
    check_per_head("sinks", sinks, query.shape[1], sequences=False)


def _on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: tuple[int, int],
    softcap: float,
    sinks: torch.Tensor | None,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch's keys are pages, one for each sequence; its query rows are packed by a copy where they are not."""
    batch, heads, seqlen_q, head_dim = query.shape
    seqlen_k = key.shape[2]
    output = torch.zeros_like(query)
    if batch == 0 or seqlen_k == 0:
        return output, query.new_full((batch, heads, seqlen_q), -torch.inf, dtype=torch.float32)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * seqlen_q
    inputs = Inputs(
        query.detach().transpose(1, 2).reshape(batch * seqlen_q, heads, head_dim),
        key.detach().transpose(1, 2),
        value.detach().transpose(1, 2),
        starts,
        None,
        torch.arange(batch, dtype=torch.int32, device=query.device)[:, None],
        torch.full((batch,), seqlen_k, dtype=torch.int32, device=query.device),
        None if sinks is None else sinks.detach(),
        None,
        None,
    )
    options = VarlenOptions(False, window, softcap, softmax_scale, None, True)
    packed, lse = launch(inputs, options, seqlen_q, seqlen_k)
    assert lse is not None
    output.copy_(packed.view(batch, seqlen_q, heads, head_dim).transpose(1, 2))
    return output, lse.view(batch, seqlen_q, heads).transpose(1, 2).contiguous()
