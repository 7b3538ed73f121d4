"""How long `cudadent42 mcp` takes until it answers `initialize`, and until a tool does, which needs the SDK.

    python benchmarks/mcp_start.py FOLDER

Writes FOLDER/mcp-start.json: seconds of the clock and of the processor until then, each the median of starts that
follow one which does not count, and the least. Processor time is what to go by on a machine that others use. Asked
for: 300 ms, without torch.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from provenance import provenance

from cudadent42.timing.processor_time import process_ns

STARTS = 15
IMPORTS = {
    "python": "pass",
    "front": "import cudadent42.commands.alone, cudadent42.agents.front",
    "tools": "import cudadent42.agents.service",
    "sdk": "import mcp.server.lowlevel.server, mcp.server.stdio",
}
CLIENT = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "start", "version": "1"},
}
FIRST = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": CLIENT})
LISTED = json.dumps({"jsonrpc": "2.0", "id": 2, "method": "tools/list"})
CALLED = json.dumps(
    {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "budget", "arguments": {}}}
)


def served(*messages: str) -> tuple[float, float]:
    """Seconds until the last of the messages is answered, and of the processor until then."""
    command = [sys.executable, "-m", "cudadent42", "mcp"]
    began_s = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for message in messages:
            process.stdin.write(message + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            spent_ns = process_ns(process.pid)
            if "result" not in json.loads(answer):
                raise RuntimeError(f"expected an answer to {message}, got {answer[:200]!r}")
        took_s = time.perf_counter() - began_s
        process.stdin.close()
    return took_s, spent_ns / 1e9


def imported(code: str) -> tuple[float, float]:
    """Seconds of a Python that runs this, and of the processor."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    took_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def times(once: Callable[[], tuple[float, float]]) -> dict[str, float]:
    once()
    clock, processor = zip(*(once() for _ in range(STARTS)), strict=True)
    return {
        "clock_s": statistics.median(clock),
        "processor_s": statistics.median(processor),
        "least_processor_s": min(processor),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "starts": STARTS,
        "load": os.getloadavg()[0],
        **provenance("cpu"),
        "initialize": times(partial(served, FIRST)),
        "tools/list": times(partial(served, FIRST, LISTED)),
        "first tool": times(partial(served, FIRST, LISTED, CALLED)),
        "imports": {name: times(partial(imported, code)) for name, code in IMPORTS.items()},
    }
    (folder / "mcp-start.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
