"""The tools as an agent's client sees them, by the SDK's own client, in memory and over standard input and output."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from served import (
    ANY,
    LIMITS,
    MODES,
    ROOT,
    answer,
    ended,
    jsonschema,
    make_server,
    mcp,
    processes,
    refusal,
    runs,
    until_gone,
    with_client,
)
from served_project import MINE, SUITE

from cudadent42.agents.tools import TOOLS
from cudadent42.base.json_schema import schema_of
from cudadent42.base.serialise import decode
from cudadent42.model.records import Results

ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


@pytest.mark.parametrize("mode", MODES)
def test_every_tool_is_described(project: Path, mode: str) -> None:
    async def use(client: Any) -> None:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(listed) == [
            *("preflight", "verify", "race_start", "race_status", "race_result", "doctor", "history"),
            *("budget", "stop"),
        ]
        for name, tool in listed.items():
            for schema in (tool.input_schema, tool.output_schema):
                jsonschema.Draft202012Validator.check_schema(schema)
                assert schema["type"] == "object"
            assert tool.output_schema == schema_of(TOOLS[name].gives)
            assert tool.input_schema["additionalProperties"] is False
            assert tool.description
        assert {name for name, tool in listed.items() if tool.annotations.read_only_hint} == {
            *("preflight", "race_status", "race_result", "history", "budget"),
        }
        assert [name for name, tool in listed.items() if tool.annotations.destructive_hint] == ["stop"]
        for name in ("verify", "race_start", "doctor"):
            assert {"max_minutes", "max_money"} <= set(listed[name].input_schema["required"])

    with_client(project, use, mode=mode)


def test_a_result_has_the_schema_of_its_file() -> None:
    """The run folder's `results.json` and what race_result gives are one record."""
    assert schema_of(TOOLS["race_result"].gives)["$defs"]["Results"] == {
        key: value for key, value in schema_of(Results).items() if key != "$defs"
    }


@pytest.mark.parametrize(
    ("tool", "arguments", "says"),
    [
        ("race_start", {}, "field 'max_minutes' is missing"),
        ("race_start", {"max_minutes": 1}, "field 'max_money' is missing"),
        ("race_start", {"max_minutes": 31, "max_money": 0}, "up to 30, which the person"),
        ("race_start", {"max_minutes": 1, "max_money": 6}, "from 0 to 5, which is left"),
        ("race_start", {**ANY, "max_minutes": "1"}, "max_minutes: expected"),
        ("race_start", {**ANY, "timer": "--sealed"}, "timer: '--sealed'"),
        ("race_start", {**ANY, "options": "--ignore-preflight"}, "unknown field 'options'"),
        ("race_start", {**ANY, "implementation": "../mine.py:attention"}, "outside of the project"),
        ("race_start", {**ANY, "implementation": "--ignore-preflight"}, "not the name of an implementation"),
        ("race_start", {**ANY, "suite": "/etc/hosts.toml"}, "outside of the project"),
        ("race_start", {**ANY, "device": "cuda:0; true"}, "expected auto, cpu, cuda or cuda:N"),
        (
            "race_start",
            {**ANY, "against": "--output=x", "implementation": "mine.py:attention"},
            "no git revision",
        ),
        (
            "race_start",
            {**ANY, "against": "HEAD", "implementation": "pytorch"},
            "expected a file of the project",
        ),
        ("race_start", {**ANY, "against": "HEAD", "implementation": "mine.py:attention"}, "has no revisions"),
        ("verify", {**ANY, "implementation": "none.py:attention"}, "has no file 'none.py'"),
        ("doctor", {**ANY, "folder": "../.."}, "outside of the project"),
        ("race_status", {"race": "race-1"}, "started no 'race-1'; there are none"),
        ("race_status", {"race": "1; true"}, "started no '1; true'"),
        ("stop", {"race": "1"}, "started no '1'"),
        ("stop", {"race": 1}, "race: expected"),
        ("history", {}, "no ledger is kept"),
        ("shell", {"command": "true"}, "there is no tool 'shell'"),
    ],
)
def test_what_is_refused_says_why_and_starts_nothing(
    project: Path, tool: str, arguments: dict[str, Any], says: str
) -> None:
    async def use(client: Any) -> None:
        text = await refusal(client, tool, **arguments)
        assert says in text
        assert "(exit code " in text
        assert (await answer(client, "budget"))["starts"] == []

    with_client(project, use)


@pytest.mark.parametrize("where", ["baseline", "implementations", "source"])
def test_a_suite_names_no_file_outside_of_the_project(project: Path, where: str) -> None:
    outside = project.parent / "outside.py"
    outside.write_text(f"open({str(project / 'mark')!r}, 'w')\n{MINE}")
    if where == "source":
        (project.parent / "outside.cpp").touch()
        text = 'schema_version = 1\nabi = 1\nname = "mine"\nsource = "../outside.cpp"\nentry = "attention"\n'
        (project / "kernel.toml").write_text(text)
        line = 'implementations = ["kernel.toml"]'
    else:
        name = f"{outside}:attention"
        line = f'baseline = "{name}"' if where == "baseline" else f'implementations = ["{name}"]'
    (project / "agents.toml").write_text(f"{line}\n{SUITE}")

    async def use(client: Any) -> None:
        text = await refusal(client, "verify", **ANY, suite="agents.toml", device="cpu")
        assert "outside of the project" in text
        assert "\n" not in text

    with_client(project, use)
    assert not (project / "mark").exists()


def test_doctor_executes_only_what_it_is_asked_to_and_what_is_the_project_s(project: Path) -> None:
    assert not decode(TOOLS["doctor"].takes, {**ANY, "folder": "."}).measure
    folder = project / "run"
    shutil.copytree(ROOT / "benchmarks/results/2026-11-20-cpu-default", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["plan"]["implementations"].append("/usr/lib/outside.py:attention")
    (folder / "manifest.json").write_text(json.dumps(manifest))

    async def use(client: Any) -> None:
        assert (await answer(client, "doctor", **ANY, folder="run"))["next_step"]
        text = await refusal(client, "doctor", **ANY, folder="run", measure=True)
        assert "outside of the project" in text
        assert len((await answer(client, "budget"))["starts"]) == 1

    with_client(project, use)


Answer = mcp.types.ElicitResult


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("given", "begins"),
    [
        (Answer(action="accept", content={"agree": True}), True),
        (Answer(action="accept", content={"agree": False}), False),
        (Answer(action="decline"), False),
        (Answer(action="cancel"), False),
    ],
    ids=["agreed", "not agreed", "declined", "cancelled"],
)
@pytest.mark.usefixtures("costly")
def test_the_person_is_asked_above_the_threshold(project: Path, mode: str, given: Any, begins: bool) -> None:
    asked: list[str] = []

    async def ask(context: Any, params: Any) -> Any:
        asked.append(params.message)
        return given

    async def use(client: Any) -> None:
        wish = {"implementation": "without_end.py:attention", "suite": "agents.toml", "device": "cpu"}
        result = await client.call_tool("race_start", {**wish, "max_minutes": 30, "max_money": 2})
        assert len(asked) == 1
        assert "30 minutes and costs up to 1.50 US dollars (mine, 3 an hour)" in asked[0]
        assert result.is_error is not begins
        budget = await answer(client, "budget")
        assert [each["state"] for each in budget["starts"]] == (["running"] if begins else [])
        assert budget["committed_usd"] == (1.5 if begins else 0)
        if begins:
            assert "from 0 to 3.5" in await refusal(client, "race_start", **wish, max_minutes=1, max_money=4)
            await answer(client, "stop", race="race-1")
            assert 0 < (await answer(client, "budget"))["committed_usd"] < 1.5

    with_client(project, use, mode=mode, elicitation_callback=ask)


@pytest.mark.usefixtures("costly")
@pytest.mark.parametrize("mode", MODES)
def test_where_nobody_can_be_asked_nothing_begins(project: Path, mode: str) -> None:
    async def use(client: Any) -> None:
        text = await refusal(client, "race_start", max_minutes=30, max_money=2)
        assert "this client cannot ask" in text
        assert (await answer(client, "budget"))["starts"] == []

    with_client(project, use, mode=mode)


def test_one_race_at_a_time_whoever_started_it_and_stop_ends_it(project: Path) -> None:
    wish = {**ANY, "implementation": "without_end.py:attention", "suite": "agents.toml", "device": "cpu"}

    async def use(client: Any) -> None:
        assert (await answer(client, "race_start", **wish))["race"] == "race-1"
        assert "at work for an agent already" in await refusal(client, "race_start", **wish)
        assert "goes on" in await refusal(client, "race_result", race="race-1")

        async def other(another: Any) -> None:
            assert "at work for an agent already" in await refusal(another, "verify", **wish)
            assert "started no 'race-1'" in await refusal(another, "stop", race="race-1")

        async with mcp.Client(make_server(project, LIMITS)) as another:
            await other(another)
        status = await answer(client, "stop", race="race-1")
        assert (status["state"], status["error"]) == ("stopped", "stopped: the agent asked for it")
        assert await answer(client, "stop", race="race-1") == status
        assert "stopped: the agent asked for it" in await refusal(client, "race_result", race="race-1")
        assert (await answer(client, "race_start", **wish))[
            "race"
        ] == "race-2"  # which the end of the server stops

    with_client(project, use)


@ONLY_LINUX
def test_stop_ends_all_that_a_race_started_and_nothing_else(project: Path) -> None:
    wish = {**ANY, "implementation": "without_end.py:attention", "suite": "agents.toml", "device": "cpu"}

    async def use(client: Any) -> None:
        bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, cwd=project)
        race = (await answer(client, "race_start", **wish))["race"]
        pids = await processes(project)
        assert all(map(runs, pids))
        await answer(client, "stop", race=race)
        await until_gone(pids)
        assert runs(bystander.pid)
        bystander.communicate(b"\n")

    with_client(project, use)


@ONLY_LINUX
@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_race_of_a_server_that_is_killed_ends_with_it(
    project: Path, fresh: bool, request: pytest.FixtureRequest
) -> None:
    """Spoken to by hand, as a client of another make does."""
    if fresh:
        request.getfixturevalue("fresh_processes")
    wish = {**ANY, "implementation": "without_end.py:attention", "suite": "agents.toml", "device": "cpu"}
    client = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "a test", "version": "1"},
    }
    messages = (
        {"id": 1, "method": "initialize", "params": client},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "race_start", "arguments": wish}},
    )
    command = [sys.executable, "-m", "cudadent42", "mcp", "--project", str(project)]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for message in messages:
            server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            server.stdin.flush()
        answers = [json.loads(server.stdout.readline()) for _ in range(2)]
        assert answers[0]["result"]["serverInfo"]["name"] == "cudadent42"
        assert answers[1]["result"]["structuredContent"]["race"] == "race-1"
        candidate, other = asyncio.run(processes(project))
        server.kill()
    asyncio.run(until_gone([candidate, other]))  # the other has a session of its own


def test_a_start_ends_when_its_minutes_are_over(project: Path) -> None:
    wish = {
        "implementation": "without_end.py:attention",
        "suite": "agents.toml",
        "device": "cpu",
        "max_money": 0,
    }

    async def use(client: Any) -> None:
        race = (await answer(client, "race_start", **wish, max_minutes=0.001))["race"]
        status = await ended(client, race)
        assert (status["state"], status["error"]) == ("stopped", "stopped: its 0.001 minutes are over")
        assert "its 0.001 minutes are over" in await refusal(client, "verify", **wish, max_minutes=0.001)

    with_client(project, use)


def test_an_error_of_the_lab_is_passed_on_with_its_exit_code(project: Path) -> None:
    async def use(client: Any) -> None:
        wish = {**ANY, "device": "cpu", "suite": "agents.toml"}
        text = await refusal(client, "verify", **wish, cases=["large"])
        assert "unknown case 'large'" in text
        assert "(exit code 2)" in text
        text = await refusal(client, "verify", **wish | {"device": "cuda:99"})
        assert "this machine is not ready" in text
        assert "(exit code 4)" in text

    with_client(project, use)


@pytest.mark.parametrize("mode", [pytest.param("legacy", marks=pytest.mark.slow), "auto"])
def test_from_preflight_to_a_result(project: Path, mode: str) -> None:
    wish = {**ANY, "implementation": "mine.py:attention", "suite": "agents.toml", "device": "cpu"}
    told: list[tuple[float, str]] = []

    async def use(client: Any) -> None:
        assert (await answer(client, "preflight", device="cpu"))["ready"]
        verified = await answer(client, "verify", **wish)
        assert (verified["passed"], verified["wrong"], verified["findings"]) == (True, [], [])
        race = (await answer(client, "race_start", **wish))["race"]
        status = await ended(client, race, told)
        assert (status["state"], status["progress"]) == ("finished", 1.0)
        result = await answer(client, "race_result", race=race)
        results = decode(Results, result["results"])
        assert result["claim_allowed"] == results.claim_allowed
        assert bool(result["quote"]) == results.claim_allowed
        assert (project / result["folder"] / "results.json").is_file()
        assert json.loads((project / result["folder"] / "manifest.json").read_text())["command"] == [
            *("cudadent42", "mcp", "race_start")
        ]
        diagnosis = await answer(client, "doctor", **ANY, folder=result["folder"], measure=False)
        assert diagnosis["next_step"]
        # Who edits the result finds no claim in it, but an error.
        path = project / result["folder"] / "results.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "speedup_geomean": 9.0}))
        assert "does not follow" in await refusal(client, "race_result", race=race)

    with_client(project, use, mode=mode)
    progress = [fraction for fraction, _ in told]
    assert progress == sorted(progress)
    assert all(0 <= fraction <= 1 for fraction in progress)
    assert {what for _, what in told} <= {
        "starting",
        "preflight",
        "build",
        "verify",
        "bench",
        "compare",
        "audit",
        "report",
    }


def test_runs_enter_the_history(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sqlalchemy", reason="needs the extra ledger")
    monkeypatch.setenv("CUDADENT42_LEDGER", str(tmp_path / "ledger.sqlite"))

    async def use(client: Any) -> None:
        assert "there is no ledger" in await refusal(client, "history")
        race = (
            await answer(
                client,
                "race_start",
                **ANY,
                suite="agents.toml",
                device="cpu",
                implementation="mine.py:attention",
            )
        )["race"]
        await ended(client, race)
        assert (await answer(client, "history"))["cases"] == [{"name": "small", "runs": 1}]
        (track,) = (await answer(client, "history", case="small/fp32"))["tracks"]
        assert len(track["points"]) == 1
        assert "no comparison of the case 'large'" in await refusal(client, "history", case="large")

    with_client(project, use)


# ---------------------------------------------------------------- the command


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def mapped(process: int) -> str:
    return Path(f"/proc/{process}/maps").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize("mode", MODES)
def test_the_command_serves_on_standard_input_and_output(project: Path, mode: str) -> None:
    command = mcp.StdioServerParameters(
        command=sys.executable,
        args=["-m", "cudadent42", "mcp", "--project", str(project), "--max-minutes", "20", "--max-cost", "0"],
        env=environment(),
    )

    async def run() -> None:
        async with mcp.Client(mcp.stdio_client(command, sys.stderr), mode=mode) as client:
            budget = await answer(client, "budget")
            assert (budget["max_minutes"], budget["max_money"]) == (20, 0)
            assert len((await client.list_tools()).tools) == len(TOOLS)
            assert "up to 20" in await refusal(client, "race_start", max_minutes=21, max_money=0)
            assert (await answer(client, "preflight", device="cpu"))["ready"]
            wish = {"implementation": "mine.py:attention", "suite": "agents.toml", "device": "cpu"}
            race = (await answer(client, "race_start", **wish, max_minutes=20, max_money=0))["race"]
            assert (await ended(client, race))["state"] == "finished"
            assert (await answer(client, "race_result", race=race))["verified"]
            if sys.platform == "linux":
                mine = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
                servers = [
                    pid for pid in mine if b"mcp" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                ]
                assert len(servers) == 1
                assert "libtorch" not in mapped(int(servers[0]))

    asyncio.run(run())


@pytest.mark.usefixtures("fresh_processes")
def test_neither_start_nor_listing_nor_refusing_imports_torch(project: Path) -> None:
    program = """
import asyncio, sys
from pathlib import Path
from mcp import Client
from cudadent42.agents.server import make_server
from cudadent42.decisions.allowance import Limits

async def run():
    async with Client(make_server(Path(sys.argv[1]), Limits(1, 1, 1))) as client:
        await client.list_tools()
        await client.call_tool("budget", {})
        await client.call_tool("race_start", {"max_minutes": 2, "max_money": 0})

asyncio.run(run())
print(sorted({"torch", "scipy", "matplotlib"} & sys.modules.keys()))
"""
    command = [sys.executable, "-c", program, str(project)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-minutes", "-1"], "--max-minutes -1"),
        (["--max-cost", "nan"], "--max-cost nan"),
        (["--project", "nowhere"], "--project nowhere: expected a folder"),
    ],
)
def test_bad_options_of_the_command(tmp_path: Path, options: list[str], says: str) -> None:
    command = [sys.executable, "-m", "cudadent42", "mcp", *options]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, input="")
    assert done.returncode == 2
    assert says in done.stderr


@pytest.mark.usefixtures("fresh_processes")
def test_without_the_extra_the_command_names_it(tmp_path: Path) -> None:
    program = (
        "import sys, importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'mcp' else real(name, *more)\n"
        "sys.argv = ['cudadent42', 'mcp']\n"
        "from cudadent42.__main__ import main\n"
        "sys.exit(main())\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, input="")
    assert done.returncode == 4
    assert "the server needs the package mcp: " in done.stderr
    assert "[mcp]" in done.stderr
