"""Tables of tuned configurations: what a table may say, whose is asked first, and what a call then takes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_science import explain, flash_attention, fused_moe
from flashmoe_science.cuda.attention.select import TUNED
from flashmoe_science.cuda.device import GPUS
from flashmoe_science.cuda.moe.select import TUNED as MOE_TUNED
from flashmoe_science.errors import InputError
from flashmoe_science.tuned.configuration import typed
from flashmoe_science.tuned.lookup import PACKAGE_FOLDER, SWITCH_VARIABLE, folders, refresh, user_folder
from flashmoe_science.tuned.table import Region, TableEntry, TableError, parse_table

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"

ENTRY = """
schema_version = 1

[[entry]]
kernel = "attention.portable"
digest = "{digest}"
device = "NVIDIA H200"
multiprocessors = 132
settings = {{ block_n = {block_n} }}
same = {{ dtype = "bf16", causal = false, head_dim = 128 }}
between = {{ seqlen_k = [1024, 4096] }}
ratio = 1.05
interval = [1.03, 1.07]
evidence = ["a-run"]
"""


def table(block_n: int = 48, digest: str | None = None) -> str:
    return ENTRY.format(digest=digest or TUNED.digest("attention.portable"), block_n=block_n)


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the user's tables."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("flashmoe_science.tuned.lookup.PACKAGE_FOLDER", tmp_path / "package")
    folder = user_folder()
    assert folder is not None
    folder.mkdir(parents=True)
    (tmp_path / "package").mkdir()
    refresh()
    yield folder
    refresh()


def explained(
    seqlen_k: int = 2048, gpu: str = "H200", dtype: torch.dtype = torch.bfloat16
) -> tuple[str, int, str]:
    query = torch.empty(1, 8, 2048, 128, dtype=dtype, device="meta")
    key = torch.empty(1, 8, seqlen_k, 128, dtype=dtype, device="meta")
    said = explain(flash_attention, query, key, key, gpu=gpu)
    return said.kernel, said.configuration.block_n, said.reason


def test_a_call_in_the_region_takes_what_the_table_says_and_explains_it(user: Path) -> None:
    before = explained()
    (user / "t.toml").write_text(table())
    refresh()
    kernel, block_n, reason = explained()
    assert before[0] == "hopper"
    assert (kernel, block_n) == ("portable", 48)
    assert reason == f"tuned on NVIDIA H200: 1.050x the usual choice (1.030 to 1.070), by {user / 't.toml'}"
    for other in (explained(512), explained(5000), explained(gpu="H100"), explained(dtype=torch.float16)):
        assert "tuned" not in other[2]
    assert explained(1024)[1] == explained(4096)[1] == 48


def test_the_switch_and_the_override_go_before_the_table(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (user / "t.toml").write_text(table())
    refresh()
    monkeypatch.setenv(SWITCH_VARIABLE, "off")
    assert "tuned" not in explained()[2]
    monkeypatch.delenv(SWITCH_VARIABLE)
    monkeypatch.setenv("FLASHMOE_CUDA_KERNEL", "hopper")
    assert explained()[0] == "hopper"


def test_the_users_table_goes_before_the_packages(user: Path, tmp_path: Path) -> None:
    (tmp_path / "package/a.toml").write_text(table(32))
    refresh()
    assert explained()[1] == 32
    (user / "z.toml").write_text(table(48))
    refresh()
    assert explained()[1] == 48


def test_an_entry_that_the_usual_choice_has_caught_up_with_claims_nothing(user: Path, tmp_path: Path) -> None:
    """It goes before the package's all the same, whose entry another configuration is faster than there."""
    usual = explained()
    text = table(48).replace("attention.portable", "attention.hopper")
    text = text.replace(TUNED.digest("attention.portable"), TUNED.digest("attention.hopper"))
    (user / "t.toml").write_text(text.replace("block_n = 48", f"block_n = {usual[1]}"))
    (tmp_path / "package/a.toml").write_text(table(32))
    refresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert explained() == usual
    (user / "t.toml").unlink()
    refresh()
    assert explained()[1] == 32


def test_entries_for_other_sources_are_ignored_with_one_warning(user: Path) -> None:
    (user / "t.toml").write_text(table(digest="0" * 64))
    refresh()
    with pytest.warns(RuntimeWarning, match=r"was tuned for other sources of attention\.portable") as record:
        kernels = {explained(keys)[0] for keys in (2048, 1500)}
    assert kernels == {"hopper"}
    assert len(record) == 1


@pytest.mark.parametrize(
    "settings",
    [
        *(
            "block_x = 48",
            'block_n = "wide"',
            "overlap = 3",
            "block_n = 0",
            "block_n = -64",
            "warps = 99999999",
        ),
        *("ablation = 1", "head_dim = 256", "block_n = 48, ablation = 2"),
    ],
)
def test_an_entry_that_cannot_be_used_is_passed_over_with_one_warning(user: Path, settings: str) -> None:
    good = table(32).partition("[[entry]]")[2]
    (user / "t.toml").write_text(table().replace("block_n = 48", settings))
    refresh()
    with pytest.warns(
        RuntimeWarning, match=r"t\.toml: the entry of attention\.portable with .* is passed over"
    ) as record:
        assert [explained(keys)[0] for keys in (2048, 1500)] == ["hopper", "hopper"]
    assert len(record) == 1
    (user / "t.toml").write_text(table().replace("block_n = 48", settings) + "[[entry]]" + good)
    refresh()
    with pytest.warns(RuntimeWarning, match="is passed over"):
        assert explained()[:2] == ("portable", 32)


@pytest.mark.parametrize("tuned", [TUNED, MOE_TUNED])
def test_what_makes_results_wrong_cannot_be_tuned(tuned: Any) -> None:
    wrong = {"ablation", "head_dim", "causal", "padded", "single_pass"}
    for kind, tunable in tuned.tunable.items():
        assert not wrong & set(tunable)
        for name in (field.name for field in fields(tuned.configurations[kind]) if field.name in wrong):
            with pytest.raises(InputError, match=f"{name} cannot be tuned; expected some of "):
                typed(tuned.configurations[kind], {name: 1}, tunable)


@pytest.mark.parametrize("value", [1, 3, 7, 1 << 20])
@pytest.mark.parametrize("kernel", [*TUNED.names(), *MOE_TUNED.names()])
def test_no_setting_makes_a_call_fail(user: Path, kernel: str, value: int) -> None:
    operation = TUNED if kernel in TUNED.names() else MOE_TUNED
    tunable = operation.tunable[operation.names()[kernel]]  # type: ignore[index]
    for name in tunable:
        for word in (value, -value, 0, "true"):
            (user / "t.toml").write_text(
                f"""schema_version = 1
                [[entry]]
                kernel = "{kernel}"
                digest = "{operation.digest(kernel)}"
                device = "NVIDIA H200"
                multiprocessors = 132
                settings = {{ "{name}" = {word} }}
                ratio = 1.05
                interval = [1.03, 1.07]
                """
            )
            refresh()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                query = torch.empty(1, 8, 2048, 128, dtype=torch.bfloat16, device="meta")
                explain(flash_attention, query, query, query, gpu="H200")
                tokens = torch.empty(8, 256, dtype=torch.bfloat16, device="meta")
                w13, w2 = (tokens.new_empty(8, *sizes) for sizes in ((256, 256), (256, 128)))
                ids = torch.empty(8, 2, dtype=torch.int32, device="meta")
                explain(fused_moe, tokens, w13, w2, ids.float(), ids, gpu="H200")


def test_a_table_that_cannot_be_read_is_left_out_with_a_warning(user: Path) -> None:
    (user / "bad.toml").write_text("[[entry]")
    (user / "good.toml").write_text(table())
    refresh()
    with pytest.warns(
        RuntimeWarning, match="tuned configurations are not used: .*bad.toml is not valid TOML"
    ):
        assert explained()[1] == 48


def test_a_table_that_is_too_large_is_refused_as_a_whole(user: Path) -> None:
    (user / "large.toml").write_text(table(32) + "#" * (4 << 20))
    refresh()
    with pytest.warns(RuntimeWarning, match=r"large\.toml is larger than 4 MiB; split it"):
        assert explained()[0] == "hopper"


def test_what_is_no_file_is_not_opened(user: Path) -> None:
    os.mkfifo(user / "pipe.toml")
    (user / "folder.toml").mkdir()
    (user / "t.toml").write_text(table(48))
    refresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert explained()[1] == 48


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("schema_version = 1", "schema_version = 2", "reads 1"),
        ("ratio = 1.05", "ratio = 'a'", "expected a ratio"),
        ("interval = [1.03, 1.07]", "interval = [0.99, 1.07]", "interval above 1"),
        ("interval = [1.03, 1.07]", "interval = [1.03]", "two numbers"),
        ("seqlen_k = [1024, 4096]", "seqlen_k = [4096, 1024]", "expected [low, high]"),
        ("seqlen_k = [1024, 4096]", "seqlen_k = 3", "expected [low, high]"),
        ('evidence = ["a-run"]', "evidence = [1]", "run folders"),
        ('kernel = "attention.portable"', "kernel = 3", "expected text"),
        ("ratio = 1.05", f"ratio = {10**400}", "expected a ratio"),
        ("interval = [1.03, 1.07]", f"interval = [1.03, {10**400}]", "two numbers"),
        ("interval = [1.03, 1.07]", "interval = [1.03, inf]", "two numbers"),
        ("block_n = 48", "block_n = 4.5", "whole numbers"),
        ("multiprocessors = 132", "multiprocessors = 132\nunknown = 1", "expected some of"),
        ("multiprocessors = 132", 'file = "../x.toml"', "beside the table"),
    ],
)
def test_what_a_table_may_not_say(old: str, new: str, problem: str) -> None:
    text = table(digest="1")
    assert old in text
    with pytest.raises(TableError) as raised:
        parse_table(text.replace(old, new), "here")
    assert problem in str(raised.value)
    assert str(raised.value).startswith("here")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('kernel = "attention.portable"', f"kernel = [{'1,' * 100_000}]"),
        ("block_n = 48", f"block_n = [{'1,' * 100_000}]"),
        ("seqlen_k = [1024, 4096]", f"{'k' * 100_000} = [{'1,' * 100_000}]"),
        ("schema_version = 1", f"schema_version = [{'1,' * 100_000}]"),
        ('evidence = ["a-run"]', f"evidence = [{'1,' * 100_000}]"),
        ("interval = [1.03, 1.07]", f"interval = [{'1,' * 100_000}]"),
        ("ratio = 1.05", f"ratio = {'=' * 100_000}"),
    ],
)
def test_a_message_repeats_no_more_than_is_read(old: str, new: str) -> None:
    text = table(digest="1")
    assert old in text
    with pytest.raises(TableError) as raised:
        parse_table(text.replace(old, new), "here")
    assert len(str(raised.value)) < 1000


def test_a_warning_of_an_entry_that_is_of_no_use_is_short(user: Path) -> None:
    (user / "t.toml").write_text(table().replace("block_n = 48", f'block_n = "{"x" * 100_000}"'))
    refresh()
    with pytest.warns(RuntimeWarning, match="is passed over") as warned:
        assert explained()[0] == "hopper"
    assert all(len(str(each.message)) < 1500 for each in warned)


@pytest.mark.parametrize("home", ["~", "", "relative"])
def test_without_a_home_no_table_of_the_working_directory_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path.replace("~", home))
    monkeypatch.chdir(tmp_path)
    assert (user_folder() is None) == (home != "")
    assert folders()[-1] == PACKAGE_FOLDER
    assert all(folder.is_absolute() for folder in folders())


@given(st.text())
def test_any_text_is_a_table_or_an_error(text: str) -> None:
    try:
        assert parse_table(f"schema_version = 1\n{text}", "here") is not None
    except TableError:
        return


@given(st.integers(-5, 5), st.integers(-5, 5), st.integers(-5, 5), st.sampled_from(["bf16", "fp16"]))
def test_a_region_is_closed_and_a_field_that_is_missing_does_not_fit(
    x: int, low: int, more: int, dtype: str
) -> None:
    region = Region({"dtype": "bf16"}, {"x": (low, low + abs(more))})
    assert region.holds({"x": x, "dtype": dtype}) is (low <= x <= low + abs(more) and dtype == "bf16")
    assert not region.holds({"x": x})
    assert not region.holds({"dtype": "bf16"})


@pytest.mark.parametrize("tuned", [TUNED, MOE_TUNED])
def test_every_kernel_that_a_table_may_configure_has_sources(tuned: object) -> None:
    assert isinstance(tuned, type(TUNED))
    digests = {tuned.digest(name) for name in tuned.names()}
    assert len(digests) == len(tuned.names())
    assert all(len(digest) == 64 for digest in digests)


def test_values_of_parts_and_enumerations_are_read() -> None:
    from flashmoe_science.configs.moe.few import TUNABLE, FewConfiguration, FewWay

    assert typed(FewConfiguration, {"up.way": "tiles", "max_slots": 512}, TUNABLE) == {
        "up.way": FewWay.TILES,
        "max_slots": 512,
    }
    for wrong in ({"up.way": "nowhere"}, {"up.none": 1}, {"max_slots": True}):
        with pytest.raises(InputError):
            typed(FewConfiguration, wrong, TUNABLE)


def shipped() -> list[TableEntry]:
    return [
        entry
        for path in sorted(PACKAGE_FOLDER.glob("*.toml"))
        for entry in parse_table(path.read_text(), str(path))
    ]


def test_tables_of_the_package_are_sound_and_for_its_sources() -> None:
    assert shipped()
    for entry in shipped():
        tuned = TUNED if entry.kernel.startswith("attention.") else MOE_TUNED
        assert entry.digest == tuned.digest(entry.kernel), "tune again, or take the entry out"
        assert 1 < entry.low <= entry.ratio <= entry.high
        assert entry.evidence
        for folder in entry.evidence:
            assert (RESULTS / folder / "manifest.json").is_file()


def call_of(entry: TableEntry) -> tuple[Any, list[torch.Tensor], dict[str, Any]]:
    """A call at an end of the entry's region: function, tensors and options."""
    told: dict[str, Any] = {
        **entry.region.same,
        **{name: each[0] for name, each in entry.region.between.items()},
    }
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[told["dtype"]]

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if entry.kernel.startswith("attention."):
        query = empty(told["batch"], told["num_heads"], told["seqlen_q"], told["head_dim"])
        key = empty(told["batch"], told["num_kv_heads"], told["seqlen_k"], told["head_dim"])
        return flash_attention, [query, key, key], {"causal": told["causal"]}
    tokens, hidden, intermediate, experts, top_k = (
        told[name] for name in ("tokens", "hidden", "intermediate", "experts", "top_k")
    )
    layer = [
        empty(tokens, hidden),
        empty(experts, 2 * intermediate, hidden),
        empty(experts, hidden, intermediate),
        empty(tokens, top_k, dtype=torch.float32),
        empty(tokens, top_k, dtype=torch.int32),
    ]
    return fused_moe, layer, {"activation": told["activation"]}


@pytest.fixture
def without_tables_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    refresh()
    yield
    refresh()


@pytest.mark.usefixtures("without_tables_of_a_user")
@pytest.mark.parametrize("entry", shipped(), ids=lambda entry: entry.evidence[0].rpartition("/")[2])
def test_a_call_takes_what_the_package_has_a_table_for(
    entry: TableEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On that GPU alone: another number of multiprocessors under its name, or the switch, is the usual choice. That is
    another configuration: an entry that it has caught up with claims a gain that nobody gets."""
    function, tensors, options = call_of(entry)
    said = explain(function, *tensors, gpu="H200", **options)
    assert said.reason.startswith(f"tuned on NVIDIA H200: {entry.ratio:.3f}x the usual choice")
    assert entry.kernel.endswith(f".{said.kernel}")
    assert {name: getattr(said.configuration, name) for name in entry.settings} == dict(entry.settings)
    part = replace(GPUS["H200"], multiprocessors=66)
    with monkeypatch.context() as patch:
        patch.setitem(GPUS, "H200", part)
        assert "tuned" not in explain(function, *tensors, gpu="H200", **options).reason
    monkeypatch.setenv(SWITCH_VARIABLE, "off")
    usual = explain(function, *tensors, gpu="H200", **options)
    assert "tuned" not in usual.reason
    assert (usual.kernel, usual.configuration) != (said.kernel, said.configuration), "take the entry out"


@pytest.mark.usefixtures("without_tables_of_a_user")
@pytest.mark.parametrize("biases", [("w13_bias",), ("w2_bias",), ("w13_bias", "w2_bias")])
def test_experts_with_biases_take_no_entry_of_experts_without(biases: tuple[str, ...]) -> None:
    """They were not raced. Nor were layouts of the gates other than an entry's."""
    entry = next(entry for entry in shipped() if entry.kernel == "moe.hopper")
    function, tensors, options = call_of(entry)
    rows = {"w13_bias": tensors[1].shape[:2], "w2_bias": tensors[2].shape[:2]}
    given: dict[str, torch.Tensor] = {name: tensors[0].new_empty(rows[name]) for name in biases}
    assert "tuned" in explain(function, *tensors, gpu="H200", **options).reason
    assert "tuned" not in explain(function, *tensors, gpu="H200", **options, **given).reason
    assert "tuned" not in explain(function, *tensors, gpu="H200", w13_layout="interleaved", **options).reason


def test_no_table_is_opened_for_a_shape_that_has_its_plan(
    user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explained()
    monkeypatch.setattr(Path, "open", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explained()
    assert SWITCH_VARIABLE not in os.environ
