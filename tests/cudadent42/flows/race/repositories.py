"""Small git repositories with a kernel in them."""

from __future__ import annotations

import subprocess
from pathlib import Path

KERNEL = """
from helper import attention_of
{extra}

def attention(query, key, value, *, causal, softmax_scale):
    return attention_of(query, key, value, causal, softmax_scale) + {offset}
"""

HELPER = """
from torch.nn.functional import scaled_dot_product_attention


def attention_of(query, key, value, causal, softmax_scale):
    rows, columns = query.shape[2], key.shape[2]
    if causal and rows != columns or query.shape[1] != key.shape[1] or rows != 16 or query.shape[3] != 32:
        raise NotImplementedError("only the case of the tests")
    return scaled_dot_product_attention(query, key, value, is_causal=causal, scale=softmax_scale)
"""

SUITE = """
name = "unit"
dtypes = ["fp32"]
repeats = 8
warmup = 0
case = [{ name = "one", batch = 1, num_heads = 1, seqlen = 16, head_dim = 32 }]
"""

ENTRY = "kernels/mine.py:attention"


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(folder: Path, message: str) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD")


def write_kernel(folder: Path, extra: str = "", offset: str = "0.0") -> None:
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    (folder / "kernels/mine.py").write_text(KERNEL.format(extra=extra, offset=offset))
    (folder / "kernels/helper.py").write_text(HELPER)


def repository(folder: Path) -> Path:
    """One commit with a right kernel."""
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    write_kernel(folder)
    commit(folder, "A kernel")
    return folder


def package(folder: Path, files: dict[str, str]) -> Path:
    """A folder with a package ``flashmoe_science`` of these files."""
    for name, text in {"__init__.py": "", **files}.items():
        path = folder / "flashmoe_science" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
