"""How long `cudadent42 mcp` takes until it answers `initialize`, and what of that is the SDK's import.

    python benchmarks/mcp_start.py FOLDER

Writes FOLDER/mcp-start.json: seconds of the clock and of the processor, each the median of starts that follow one which
does not count. Asked for: 300 ms, without torch.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

STARTS = 15
IMPORTS = {
    "python": "pass",
    "lab": "import cudadent42.commands.cli, cudadent42.agents.service",
    "sdk": "import mcp.server.lowlevel.server, mcp.server.stdio",
}
CLIENT = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "start", "version": "1"},
}
FIRST = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": CLIENT}) + "\n"


def spent_s() -> float:
    """Of the processor, by children that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def timed(command: list[str], first: str = "") -> tuple[float, float]:
    """Seconds until the first answer, or the end, and of the processor."""
    before_s, began_s = spent_s(), time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(first)
        process.stdin.flush()
        answer = process.stdout.readline()
        took_s = time.perf_counter() - began_s
        if first and "serverInfo" not in answer:
            raise RuntimeError(f"expected an answer to initialize, got {answer[:200]!r}")
        process.stdin.close()
    return took_s, spent_s() - before_s


def medians(command: list[str], first: str = "") -> dict[str, float]:
    timed(command, first)
    clock, processor = zip(*(timed(command, first) for _ in range(STARTS)), strict=True)
    return {"clock_s": statistics.median(clock), "processor_s": statistics.median(processor)}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "starts": STARTS,
        "load": os.getloadavg()[0],
        "server": medians([sys.executable, "-m", "cudadent42", "mcp"], FIRST),
        "imports": {name: medians([sys.executable, "-c", code]) for name, code in IMPORTS.items()},
    }
    (folder / "mcp-start.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
