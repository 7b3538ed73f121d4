"""What this project's attention, or a variant of it, takes for a case: kernel, configuration, and what is compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from cudadent42.model.dtypes import DTYPES
from cudadent42.model.implementations import NOT_DONE, UnsupportedCaseError
from cudadent42.operations.attention.case import AttentionCase
from cudadent42.operations.attention.implementations import variant_choice, variants_of
from cudadent42.operations.interface import Configured
from cudadent42.operations.variants import chosen
from flashmoe_science.cuda.attention import compiled
from flashmoe_science.cuda.attention.forward import asked
from flashmoe_science.cuda.attention.select import FORWARD
from flashmoe_science.cuda.device import Device


def configured(name: str, case: AttentionCase, device: Device) -> Configured:
    """As `Definition.configured`."""

    def tensor(heads: int, rows: int) -> Tensor:
        return torch.empty(case.batch, heads, rows, case.head_dim, dtype=DTYPES[case.dtype], device="meta")

    keys = tensor(case.num_kv_heads, case.seqlen_k)
    try:
        query = tensor(case.num_heads, case.seqlen_q)
        problem, _ = asked(query, keys, keys, case.causal, None, False, device)
        choice = chosen(name, variants_of(), variant_choice, FORWARD, problem, device)
    except NOT_DONE as error:
        raise UnsupportedCaseError(str(error)) from error
    return Configured(choice, (compiled(choice, problem.dtype, device.architecture),))
