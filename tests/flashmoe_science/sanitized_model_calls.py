"""Run by tools/sanitize.sh under compute-sanitizer: what models use beside attention and experts.

Rotations of queries and keys, and lists of the keys that a mask shows, each compared with what is right, so that a
kernel that does nothing does not pass. Prints "passed" when all calls were right; a wrong one raises.
"""

from __future__ import annotations

import sys

import torch
from rotation_cases import CASES, exact

from flashmoe_science.cuda import key_lists, rotation


def rotations() -> int:
    launches = 0
    for case in CASES.values():
        for dtype in rotation.DTYPES:
            for inverse in (False, True):
                tensors = case.make(dtype, "cuda")
                precision = torch.finfo(dtype).eps
                results = rotation.rotate(*tensors, inverse)
                for result, right in zip(results, exact(tensors, inverse), strict=True):
                    torch.testing.assert_close(
                        result.double().cpu(), right, rtol=precision, atol=4 * precision
                    )
                launches += 1
    return launches


def lists() -> int:
    launches = 0
    for batch, seqlen_q, seqlen_k in ((1, 1, 1), (2, 16, 16), (3, 1, 700), (1, 2, 4500)):
        seen = torch.rand(batch, seqlen_q, seqlen_k) < 0.5
        keys, counts, _ = (each.cpu() for each in key_lists.key_lists(seen.cuda(), seqlen_k))
        for row in range(batch * seqlen_q):
            shown = seen.view(-1, seqlen_k)[row].nonzero()[:, 0] + row // seqlen_q * seqlen_k
            assert keys[row, : int(counts[row])].tolist() == shown.tolist()
        launches += 1
    return launches


def main() -> None:
    torch.manual_seed(0)
    launches = rotations() + lists()
    torch.cuda.synchronize()
    print("passed; launches:", launches)


if __name__ == "__main__":
    sys.exit(main())
