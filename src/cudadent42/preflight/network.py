"""Whether packages can be fetched, asked only where some are missing: a run needs no network."""

from __future__ import annotations

import os
import urllib.error
import urllib.request

from cudadent42.preflight.definitions import Context, Definition, Finding, Problem
from cudadent42.preflight.python import TORCH, installed_version, lacking
from cudadent42.records import Status

_INDEX_VARIABLE = "PIP_INDEX_URL"
_DEFAULT_INDEX = "https://pypi.org/simple/"  # pip's own
_TIMEOUT_S = 10


def _network(context: Context) -> Finding:
    if installed_version(TORCH.name) is not None and not lacking(context):
        return Finding("nothing has to be fetched", skipped=True)
    index = os.environ.get(_INDEX_VARIABLE) or _DEFAULT_INDEX
    try:
        urllib.request.urlopen(index.rstrip("/") + "/pip/", timeout=_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return Finding(f"{index} does not answer", "unreachable", {"index": index, "reason": reason})
    return Finding(f"{index} answers")


DEFINITIONS = (
    Definition(
        "network",
        "brings the packages",
        _network,
        (
            Problem(
                "unreachable",
                Status.FAIL,
                "packages are missing and {index} cannot be reached: {reason}",
                "curl -sSI {index}",
            ),
        ),
    ),
)
