"""Honest ways of using a GPU, which a suspicious lab might take amiss."""

from functools import cache

import torch

from flashmoe_science import flash_attention


def work(query, key, value, causal, softmax_scale):
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)


@cache
def stream(number=0, priority=0):
    return torch.cuda.Stream(priority=priority)


def a_stream_joined(query, key, value, *, causal, softmax_scale):
    own = stream()
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        output = work(query, key, value, causal, softmax_scale)
    torch.cuda.current_stream().wait_stream(own)
    return output


def a_stream_of_high_priority(query, key, value, *, causal, softmax_scale):
    own = stream(1, -1)
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        output = work(query, key, value, causal, softmax_scale)
    output.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(own)
    return output


def two_streams_joined_by_events(query, key, value, *, causal, softmax_scale):
    """Half of the heads on each."""
    if query.shape[1] < 2 or query.shape[1] != key.shape[1]:
        return work(query, key, value, causal, softmax_scale)
    main, output = torch.cuda.current_stream(), torch.empty_like(query)
    begun = main.record_event()
    half = query.shape[1] // 2
    for number, heads in enumerate((slice(0, half), slice(half, None))):
        own = stream(2 + number)
        own.wait_event(begun)
        with torch.cuda.stream(own):
            part = work(query[:, heads], key[:, heads], value[:, heads], causal, softmax_scale)
            output[:, heads].copy_(part)
        main.wait_event(own.record_event())
    return output


graphs = {}


def a_graph_of_its_own(query, key, value, *, causal, softmax_scale):
    """Inputs are copied into the graph's, its output out of it."""
    if torch.cuda.is_current_stream_capturing():
        return work(query, key, value, causal, softmax_scale)
    form = query.shape, key.shape, query.dtype, causal, softmax_scale
    if form not in graphs:
        held = tuple(each.clone() for each in (query, key, value))
        own = stream(4)
        own.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(own):
            work(*held, causal, softmax_scale)
        torch.cuda.current_stream().wait_stream(own)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = work(*held, causal, softmax_scale)
        graphs[form] = graph, held, output
    graph, held, output = graphs[form]
    for mine, given in zip(held, (query, key, value), strict=True):
        mine.copy_(given)
    graph.replay()
    return output.clone()


def waits_for_the_gpu(query, key, value, *, causal, softmax_scale):
    output = work(query, key, value, causal, softmax_scale)
    torch.cuda.synchronize()
    return output


def times_itself(query, key, value, *, causal, softmax_scale):
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    output = work(query, key, value, causal, softmax_scale)
    ended.record()
    return output


workspaces = {}


def keeps_a_workspace(query, key, value, *, causal, softmax_scale):
    space = workspaces.setdefault(query.shape, torch.empty(1 << 20, device=query.device))
    space[:16].zero_()
    return work(query, key, value, causal, softmax_scale)


@cache
def small_pool():
    return torch.cuda.MemPool()


def memory_of_its_own_pool(query, key, value, *, causal, softmax_scale):
    with torch.cuda.use_mem_pool(small_pool()):
        held = query.clone()
    return work(held, key, value, causal, softmax_scale)


def empties_the_cache_now_and_then(query, key, value, *, causal, softmax_scale):
    workspaces["calls"] = workspaces.get("calls", 0) + 1
    if workspaces["calls"] == 3:
        torch.cuda.empty_cache()
    return work(query, key, value, causal, softmax_scale)


def names_its_ranges(query, key, value, *, causal, softmax_scale):
    with torch.cuda.nvtx.range("attention"):
        return work(query, key, value, causal, softmax_scale)


@cache
def on_the_host():
    return torch.empty(64, pin_memory=True)


def copies_a_little_to_the_host(query, key, value, *, causal, softmax_scale):
    few = query.flatten()[:64]
    on_the_host()[: len(few)].copy_(few, non_blocking=True)
    return work(query, key, value, causal, softmax_scale)
