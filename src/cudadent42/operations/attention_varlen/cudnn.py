"""cuDNN's attention over a paged cache as a peer, through NVIDIA's own front end for Python."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cudadent42.model.implementations import Call, UnsupportedCaseError
from cudadent42.operations.attention_varlen.case import VarlenCase

if TYPE_CHECKING:
    from torch import Tensor

    from cudadent42.operations.attention_varlen.inputs import VarlenInputs


def prepare_cudnn(case: VarlenCase, inputs: VarlenInputs) -> Call:
    """A graph of one operation, built once before: decode steps of equally many queries over pages in 16 bits."""
    import torch

    table = inputs.block_table
    if table is None or case.fp8_scales:
        raise UnsupportedCaseError("cuDNN is asked for pages in 16 bits alone")
    if case.tree or case.sinks or case.softcap or case.window >= 0:
        raise UnsupportedCaseError("cuDNN is not asked for trees, sinks, soft caps and windows")
    if case.alibi or case.value_dim:
        raise UnsupportedCaseError("cuDNN is not asked for ALiBi and for values of their own head dim")
    queries = case.seqlens_q[0]
    if len(set(case.seqlens_q)) > 1:
        raise UnsupportedCaseError("cuDNN is asked for as many queries of each sequence")
    if not queries or not all(case.seqlens_k):
        raise UnsupportedCaseError("cuDNN is not asked for empty sequences")
    cudnn = importlib.import_module("cudnn")
    element = {"fp16": cudnn.data_type.HALF, "bf16": cudnn.data_type.BFLOAT16}.get(case.dtype)
    if element is None:
        raise UnsupportedCaseError("cuDNN takes fp16 and bf16")

    def by_heads(rows: Tensor) -> Tensor:
        return rows.view(case.batch, queries, case.num_heads, case.head_dim).transpose(1, 2)

    query = by_heads(inputs.query)
    key, value = (pages.transpose(1, 2) for pages in (inputs.key, inputs.value))  # (pages, heads, slots, dim)
    # Behind a sequence's length its table is not read, but numbers of pages are wanted there.
    tables = table.clamp(min=0)[:, None, :, None].contiguous()
    keys = inputs.seqused_k.view(-1, 1, 1, 1)
    rows = torch.full_like(keys, queries)
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=element,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    of_table = graph.tensor_like(tables)
    of_query, of_key, of_value, of_rows, of_keys = (
        graph.tensor_like(tensor) for tensor in (query, key, value, rows, keys)
    )
    of_output, _ = graph.sdpa(
        name="sdpa",
        q=of_query,
        k=of_key,
        v=of_value,
        generate_stats=False,
        attn_scale=case.head_dim**-0.5,
        use_padding_mask=True,
        use_causal_mask_bottom_right=case.causal and queries > 1,
        seq_len_q=of_rows,
        seq_len_kv=of_keys,
        paged_attention_k_table=of_table,
        paged_attention_v_table=of_table,
        paged_attention_max_seq_len_kv=table.shape[1] * case.page_size,
    )
    of_output.set_output(True).set_dim(list(query.shape)).set_stride(list(query.stride()))
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
    except cudnn.cudnnGraphNotSupportedError as refusal:
        raise UnsupportedCaseError(f"cuDNN: {' '.join(str(refusal).split())[:200]}") from refusal
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=query.device)
    given: dict[Any, Tensor] = {
        of_query: query,
        of_key: key,
        of_value: value,
        of_rows: rows,
        of_keys: keys,
        of_table: tables,
    }

    def call() -> Tensor:
        output = torch.empty_like(inputs.query)
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute({**given, of_output: by_heads(output)}, workspace, handle=handle)
        return output

    return call
