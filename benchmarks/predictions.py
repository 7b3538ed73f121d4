"""How far the prediction for a whole script is off: recorded, raced and replayed, as docs/capture.md goes through it.

    python benchmarks/predictions.py --output FOLDER                    # the scripts of predicted/, on the CPU
    python benchmarks/predictions.py --output FOLDER --device cuda --script train_gpt

``FOLDER/predictions.json`` has, for each script, the recorded seconds, what was predicted, what the replay measured and
how far it was off, as a share of the script's time. The suites stand beside it; the run folders of the races, with
their reports, are below ``FOLDER/runs``. When the script is called again, it measures the scripts that are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from provenance import provenance

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path("benchmarks/predicted")
NAMES = tuple(sorted(path.stem for path in (ROOT / SCRIPTS).glob("*.py")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--script", action="append", choices=NAMES, help="Default: all of them.")
    parser.add_argument("--runs", type=int, default=3, help="Runs that are recorded.")
    parser.add_argument("--pairs", type=int, default=5, help="Pairs of runs that are replayed.")
    chosen = parser.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    kept = chosen.output / "predictions.json"
    document: dict[str, Any] = (
        json.loads(kept.read_text())
        if kept.exists()
        else {"provenance": provenance(chosen.device.partition(":")[0]), "scripts": {}}
    )
    for name in chosen.script or NAMES:
        if name in document["scripts"]:
            continue
        document["scripts"][name] = measured(name, chosen)
        kept.write_text(json.dumps(document, indent=1) + "\n")
        replayed = document["scripts"][name]["replay"]
        print(name, f"off by {replayed['error']:+.2%} of the script's time", flush=True)


def measured(name: str, chosen: argparse.Namespace) -> dict[str, Any]:
    began_s = time.monotonic()
    script = [str(SCRIPTS / f"{name}.py"), "--device", chosen.device]
    output = Path(
        os.path.relpath(chosen.output, ROOT)
    )  # so that suites and manifests name no folder of this machine
    suite = output / f"{name}.toml"
    recorded = lab("capture", "--json", "--runs", str(chosen.runs), "--output", str(suite), *script)
    suites = sorted(output / each.name for each in chosen.output.glob(f"{name}*.toml"))
    folders = [output / "runs" / each.stem for each in suites]
    for each, folder in zip(suites, folders, strict=True):
        lab("run", "--json", "--suite", str(each), "--device", chosen.device, "--output-dir", str(folder))
    replays = [argument for folder in folders for argument in ("--replay", str(folder))]
    replayed = lab("capture", "--json", "--pairs", str(chosen.pairs), *replays, *script)
    return {"recorded": recorded, "replay": replayed, "took_s": time.monotonic() - began_s}


def lab(*arguments: str) -> Any:
    """What a command of the lab prints as JSON; raises CalledProcessError where it fails."""
    command = [sys.executable, "-m", "cudadent42", *arguments]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=ROOT).stdout)


if __name__ == "__main__":
    main()
