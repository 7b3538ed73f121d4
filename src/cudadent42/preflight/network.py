"""Whether packages can be fetched, asked only where some are missing: a run needs no network."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request

from cudadent42.model.records import Status
from cudadent42.preflight.definitions import Context, Definition, Finding, Problem
from cudadent42.preflight.python import TORCH, installed_version, lacking

_INDEX_VARIABLE = "PIP_INDEX_URL"
_DEFAULT_INDEX = "https://pypi.org/simple/"  # pip's own
_TIMEOUT_S = 10


def _network(context: Context) -> Finding:
    if installed_version(TORCH.name) is not None and not lacking(context):
        return Finding("nothing has to be fetched", skipped=True)
    index = without_password(os.environ.get(_INDEX_VARIABLE) or _DEFAULT_INDEX)
    try:
        # Whether it lets anybody in is not asked: a refusal is an answer.
        urllib.request.urlopen(index.rstrip("/") + "/pip/", timeout=_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return Finding(f"{index} does not answer", "unreachable", {"index": index, "reason": reason})
    return Finding(f"{index} answers")


def without_password(address: str) -> str:
    """The address without the name and password that it may hold: it is shown, and kept in logs."""
    scheme, separator, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    return scheme + separator + host.rpartition("@")[2] + slash + path


DEFINITIONS = (
    Definition(
        "network",
        "brings the packages",
        _network,
        (
            Problem(
                "unreachable",
                Status.FAIL,
                "packages are missing and {index} cannot be reached: {reason}; PIP_INDEX_URL names another",
                "curl -sSI {index}",
            ),
        ),
    ),
)
