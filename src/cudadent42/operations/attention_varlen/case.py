"""One batch of sequences of different lengths, packed or in the pages of a cache."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from cudadent42.model.cases import element_bytes


@dataclass(frozen=True)
class VarlenCase:
    """Lengths follow from the numbers here: by Zipf's law from the longest down, in an order from ``draw``."""

    operation: ClassVar[str] = "attention_varlen"

    name: str
    dtype: str
    """``fp16``, ``bf16`` or ``fp32``."""
    batch: int
    num_heads: int
    num_kv_heads: int
    longest: int
    """Keys of the longest sequence; the one of rank r has longest / r."""
    shortest: int
    """And none has fewer."""
    head_dim: int
    queries: int = 1
    """Of each sequence, its last ones; 0: as many as it has keys."""
    chunks: int = 0
    """The first so many sequences have ``chunk`` queries instead: parts of prompts."""
    chunk: int = 0
    page_size: int = 0
    """0: keys are packed."""
    causal: bool = True
    window: int = -1
    """Keys seen before a query's own; -1: all."""
    draw: int = 0

    @property
    def id(self) -> str:
        """Unique in a plan: ``name/dtype``."""
        return f"{self.name}/{self.dtype}"

    @property
    def seqlens_k(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        lengths = [max(self.shortest, self.longest // rank) for rank in range(1, self.batch + 1)]
        Random(f"{self.longest}-{self.shortest}-{self.batch}-{self.draw}").shuffle(lengths)
        return tuple(lengths)

    @property
    def seqlens_q(self) -> tuple[int, ...]:
        """Queries of each sequence."""
        return tuple(
            self.chunk if index < self.chunks else self.queries or length
            for index, length in enumerate(self.seqlens_k)
        )

    @property
    def pages(self) -> tuple[int, ...]:
        """Of each sequence."""
        return tuple(-(-length // self.page_size) for length in self.seqlens_k) if self.page_size else ()

    @property
    def tokens(self) -> int:
        return sum(self.seqlens_q)

    @property
    def sides(self) -> tuple[int, int]:
        """The window as `flashmoe_science.attention_varlen` takes it."""
        return self.window, 0 if self.causal else -1

    def visible(self, queries: int, keys: int) -> tuple[int, int]:
        """Of a sequence: query-key pairs that the mask lets through, and keys that any query sees."""
        if queries == 0 or keys == 0:
            return 0, 0
        if self.window < 0:
            if not self.causal:
                return queries * keys, keys
            fewest = max(
                1, keys - queries + 1
            )  # keys of the first query that sees any; each further one sees one more
            return (fewest + keys) * (keys - fewest + 1) // 2, keys
        pairs = 0
        for position in range(keys - queries, keys):
            last = position + 1 if self.causal else keys
            pairs += max(0, last - max(0, position - self.window))
        return pairs, keys - max(0, keys - queries - self.window)

    @property
    def scores(self) -> int:
        """Query-key pairs that the mask lets through, over all heads."""
        lengths = zip(self.seqlens_q, self.seqlens_k, strict=True)
        return self.num_heads * sum(self.visible(*each)[0] for each in lengths)

    @property
    def flops(self) -> int:
        """Floating-point operations of the two matrix products."""
        return 4 * self.scores * self.head_dim

    @property
    def bytes_min(self) -> int:
        """Fewest bytes moved: queries, and keys and values that any query sees, read once, the output written once."""
        lengths = zip(self.seqlens_q, self.seqlens_k, strict=True)
        keys = sum(self.visible(*each)[1] for each in lengths)
        rows = 2 * self.tokens * self.num_heads + 2 * keys * self.num_kv_heads
        return element_bytes(self.dtype) * rows * self.head_dim

    def memory_bytes(self, sets: int) -> int:
        """Bytes of so many sets of inputs, with an output each."""
        slots = sum(self.pages) * self.page_size if self.page_size else sum(self.seqlens_k)
        rows = 2 * self.tokens * self.num_heads + 2 * slots * self.num_kv_heads
        return sets * element_bytes(self.dtype) * rows * self.head_dim
