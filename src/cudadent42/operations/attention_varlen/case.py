"""One batch of sequences of different lengths, packed or in the pages of a cache."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from cudadent42.model.cases import element_bytes
from cudadent42.operations.attention_varlen.trees import MOST_NODES, words_of

FP8_SCALES = ("all", "head", "key")
"""What a scale of a cache in FP8 is for: all keys, those of a head, or one key of one head."""
_SCALE_BYTES = 4


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
    fp8_scales: str = ""
    """One of ``FP8_SCALES``: keys and values are e4m3 with such scales. Empty: they have the case's dtype."""
    tree: str = ""
    """One of `trees.TREES`: queries of a sequence are the nodes of such a tree. Empty: they follow one another."""
    sinks: bool = False
    """Each head has a logit more, which takes part in the softmax and has no value."""
    softcap: float = 0.0
    """Scores s become softcap * tanh(s / softcap); 0: they stay as they are."""
    value_dim: int = 0
    """Of a value of one head, and so of a result's row; 0: ``head_dim``."""
    alibi: bool = False
    """A score falls with the distance of its key, by a slope of its head (`inputs.alibi_slopes`)."""

    @property
    def id(self) -> str:
        """Unique in a plan: ``name/dtype``."""
        return f"{self.name}/{self.dtype}"

    @property
    def head_dim_v(self) -> int:
        """``value_dim`` as a number of elements."""
        return self.value_dim or self.head_dim

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

    def words(self, index: int) -> list[int]:
        """Of a sequence with a tree: for each query, a bit for each of the queries whose keys it sees; else none."""
        queries = self.seqlens_q[index]
        if not self.tree or queries > MOST_NODES:
            return []
        return words_of(self.tree, queries, f"{self.tree}-{queries}-{index}-{self.draw}")

    def visible(self, queries: int, keys: int) -> tuple[int, int]:
        """Of a sequence without a tree: query-key pairs that the mask lets through, and keys that any query sees."""
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
        pairs = 0
        for index, (queries, keys) in enumerate(zip(self.seqlens_q, self.seqlens_k, strict=True)):
            words = self.words(index)
            if words:
                # The first nodes have no key where there are fewer keys than queries.
                keyless = max(0, queries - keys)
                pairs += queries * max(0, keys - queries) + sum(
                    bin(word >> keyless).count("1") for word in words
                )
            else:
                pairs += self.visible(queries, keys)[0]
        return self.num_heads * pairs

    @property
    def flops(self) -> int:
        """Floating-point operations of the two matrix products."""
        return 2 * self.scores * self._elements

    @property
    def bytes_min(self) -> int:
        """Fewest bytes moved: queries, and keys and values that any query sees, read once, the output written once.

        A tree hides no key from all of its queries: each sees its own.
        """
        lengths = zip(self.seqlens_q, self.seqlens_k, strict=True)
        keys = sum(self.visible(*each)[1] for each in lengths)
        return self._bytes_of_rows + keys * self.num_kv_heads * self._bytes_of_key

    def memory_bytes(self, sets: int) -> int:
        """Bytes of so many sets of inputs, with an output each."""
        slots = sum(self.pages) * self.page_size if self.page_size else sum(self.seqlens_k)
        of_key = self._bytes_of_key
        if self.fp8_scales:
            of_key += (
                element_bytes(self.dtype) * self._elements
            )  # the same in 16 bits, for those who read no FP8
        return sets * (self._bytes_of_rows + slots * self.num_kv_heads * of_key)

    @property
    def _elements(self) -> int:
        """Of a key and its value, or of a query and its result, of one head."""
        return self.head_dim + self.head_dim_v

    @property
    def _bytes_of_rows(self) -> int:
        """Of all queries and results."""
        return element_bytes(self.dtype) * self.tokens * self.num_heads * self._elements

    @property
    def _bytes_of_key(self) -> int:
        """And its value, of one head."""
        if not self.fp8_scales:
            return element_bytes(self.dtype) * self._elements
        return self._elements + (2 * _SCALE_BYTES if self.fp8_scales == "key" else 0)
