"""The environment of a sandboxed process: an allow list. Nothing that may be a secret passes by accident."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_NAMES = frozenset(
    (
        *("PATH", "LANG", "LANGUAGE", "TZ", "TERM", "COLUMNS", "LD_LIBRARY_PATH", "LD_PRELOAD"),
        *(
            "VIRTUAL_ENV",
            "CC",
            "CXX",
            "CUDADENT42_WORKER",
            "CUDADENT42_PARCELS",
            "SOURCE_DATE_EPOCH",
            "NVCC_APPEND_FLAGS",
        ),
    )
)
_PREFIXES = (
    *("LC_", "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "ONEDNN_", "DNNL_"),
    *("ATEN_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "FLASHMOE_", "MALLOC_"),
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|COOKIE|(^|_)KEY($|_)|APIKEY|AUTH", re.IGNORECASE)


def cleaned(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment a candidate may see: how it is compiled and timed, and no more."""
    kept = {
        name: value
        for name, value in environment.items()
        if (name in _NAMES or name.startswith(_PREFIXES)) and not _SECRET.search(name)
    }
    if "PYTHONPATH" in kept:  # a relative entry is whatever folder a process is in
        kept["PYTHONPATH"] = os.pathsep.join(filter(os.path.isabs, kept["PYTHONPATH"].split(os.pathsep)))
    return kept


def private_places(scratch: str) -> dict[str, str]:
    """Variables that lead everything that is written to the scratch folder."""
    return {
        "HOME": f"{scratch}/home",
        "TMPDIR": f"{scratch}/tmp",
        "XDG_CACHE_HOME": f"{scratch}/home/.cache",
        "FLASHMOE_CACHE_DIR": f"{scratch}/cache",
        "CUDA_CACHE_PATH": f"{scratch}/home/.nv/ComputeCache",
        "TRITON_CACHE_DIR": f"{scratch}/home/.triton/cache",
        "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/home/.cache/inductor",
        "TORCH_EXTENSIONS_DIR": f"{scratch}/home/.cache/torch_extensions",
    }
