"""Attention for serving: sequences of any lengths, packed or in pages, in one call.

A call goes `attention.attention_varlen` -> `arguments.check` -> a backend's `prepare`, once for each `problem.Problem`,
and then only -> what `prepare` returned.
"""
