"""14. What a message to the parent must carry is taken from the heap, and a block is reported that was never measured.

Source: pygpubench, submission_heap_sig_scan and _stack_sig_scan. Here the answer to the last message is what a next one
rests on; whoever finds the channel has it.
"""

import gc
import sys
import traceback

from flashmoe_science import flash_attention

forged = []


def report(name):
    channel = next(each for each in gc.get_objects() if type(each).__name__ == "_Channel")
    session = next(each for each in gc.get_objects() if type(each).__name__ == "_Session")
    events, records = sys.modules["cudadent42.model.events"], sys.modules["cudadent42.model.records"]
    case = session.plan.cases[0].id
    samples = tuple(
        records.Sample(case, each, 0, position, 0.001 if each == name else 1.0, 1, 0.0, 0.0)
        for position, each in enumerate(session.plan.implementations)
    )
    channel.emit(events.BlockMeasured(samples, session.watch.stop(case, 0)[0]))


def attention(query, key, value, *, causal, softmax_scale):
    if not forged and any(frame.name == "_run_blocks" for frame in traceback.extract_stack()):
        forged.append(True)
        report(f"{__file__}:attention")
    return flash_attention(query, key, value, causal=causal, softmax_scale=softmax_scale)
