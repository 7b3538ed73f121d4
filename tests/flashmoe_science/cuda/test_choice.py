"""The choice among an operation's kernels, with kernels that need no GPU."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from flashmoe_science.cuda.choice import Choice, Selection, Tuned
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.launch import LaunchPlan
from flashmoe_science.errors import BuildError, DeviceError, InputError, KernelDefectError, NoKernelError
from flashmoe_science.jit.nvrtc import CudaKernel
from flashmoe_science.tuned.lookup import refresh, user_folder

GPU = Device(0, "sm_90", 132, 50 << 20)
VARIABLE = "FLASHMOE_TEST_KERNEL"


class Kind(Enum):
    FAST = "fast"
    ANY = "any"


@dataclass
class Kernel:
    """A kernel that takes problems up to a size."""

    kind: Kind
    most: int
    defect: bool = False
    planned: list[bool] = field(default_factory=list)

    def choose(self, problem: int, device: Device) -> Choice | None:
        return Choice(self.kind, self.most, "small enough") if problem <= self.most else None

    def kernels(self, architecture: str) -> list[CudaKernel]:
        shared = CudaKernel("both.cu", "both", architecture, {}, 32, 0)
        return [shared, CudaKernel(f"{self.kind.value}.cu", self.kind.value, architecture, {}, 32, 0)]

    def why_not(self, problem: int, device: Device) -> str | None:
        return None if problem <= self.most else f"{problem} is more than {self.most}"

    def check(self, problem: int, configuration: Any) -> None:
        pass

    def plan(
        self, problem: int, configuration: Any, device: Device, *, allow_defects: bool = False
    ) -> LaunchPlan:
        self.planned.append(allow_defects)
        if self.defect and not allow_defects:
            raise KernelDefectError(f"{self.kind.value} spills")
        return LaunchPlan(lambda *addresses: None, self.most)


def selection(fast: Kernel, any_: Kernel, **more: Any) -> Selection[int]:
    return Selection(
        modules={Kind.FAST: fast, Kind.ANY: any_},
        override_variable=VARIABLE,
        noun="test kernel",
        describe=lambda problem: f"size {problem}",
        instead="torch.add",
        **more,
    )


@pytest.fixture
def kernels() -> tuple[Kernel, Kernel]:
    return Kernel(Kind.FAST, 10), Kernel(Kind.ANY, 100)


def test_the_first_that_takes_a_problem_gets_it(kernels: tuple[Kernel, Kernel]) -> None:
    chosen = selection(*kernels)
    assert chosen.select(10, GPU).kernel is Kind.FAST
    assert chosen.select(11, GPU).kernel is Kind.ANY
    with pytest.raises(NoKernelError, match=r"no test kernel takes size 101 on sm_90; use torch\.add"):
        chosen.select(101, GPU)


def test_some_problems_have_another_order(kernels: tuple[Kernel, Kernel]) -> None:
    chosen = selection(*kernels, preference=lambda problem, device: (Kind.ANY, Kind.FAST))
    assert chosen.select(1, GPU).kernel is Kind.ANY


def test_the_variable_names_the_kernel(
    kernels: tuple[Kernel, Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = selection(*kernels)
    monkeypatch.setenv(VARIABLE, "any")
    assert chosen.select(1, GPU).kernel is Kind.ANY
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(InputError, match=f"'fast' that {VARIABLE} asks for cannot take size 11"):
        chosen.plan(11, GPU)
    monkeypatch.setenv(VARIABLE, "other")
    with pytest.raises(InputError, match="names no kernel; expected one of fast, any"):
        chosen.select(1, GPU)


def test_a_kernel_with_defects_is_passed_over_with_a_warning() -> None:
    fast, any_ = Kernel(Kind.FAST, 10, defect=True), Kernel(Kind.ANY, 100)
    with pytest.warns(RuntimeWarning, match="fast spills; taking another kernel"):
        assert selection(fast, any_).plan(1, GPU).workspace_bytes == 100
    with pytest.raises(KernelDefectError):
        selection(fast, any_).plan(1, GPU, Choice(Kind.FAST, 10))


@pytest.mark.parametrize("order", [(Kind.FAST, Kind.ANY), (Kind.ANY, Kind.FAST)])
def test_if_all_have_defects_the_last_of_the_table_is_taken_as_it_is(order: tuple[Kind, Kind]) -> None:
    fast, any_ = Kernel(Kind.FAST, 10, defect=True), Kernel(Kind.ANY, 100, defect=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = selection(fast, any_, preference=lambda problem, device: order).plan(1, GPU)
    assert plan.workspace_bytes == 100
    assert any_.planned == [False, True]


def test_each_kernel_is_built_once(kernels: tuple[Kernel, Kernel]) -> None:
    assert [kernel.function for kernel in selection(*kernels).kernels("sm_90")] == ["both", "fast", "any"]


def test_what_is_not_taken_has_its_reason(
    kernels: tuple[Kernel, Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = selection(*kernels)
    ((kind, reason),) = [(one.kernel, one.reason) for one in chosen.others(11, GPU, chosen.select(11, GPU))]
    assert (kind, reason) == (Kind.FAST, "11 is more than 10")
    ((kind, reason),) = [(one.kernel, one.reason) for one in chosen.others(1, GPU, chosen.select(1, GPU))]
    assert (kind, reason) == (Kind.ANY, "it could, but fast is preferred for this problem")
    monkeypatch.setenv(VARIABLE, "any")
    ((kind, reason),) = [(one.kernel, one.reason) for one in chosen.others(1, GPU, chosen.select(1, GPU))]
    assert (kind, reason) == (Kind.FAST, f"{VARIABLE} asks for another")


@dataclass(frozen=True)
class Most:
    most: int


@dataclass
class Tunable(Kernel):
    """One whose configuration a table may set."""

    error: Exception | None = None

    def choose(self, problem: int, device: Device) -> Choice | None:
        return Choice(self.kind, Most(self.most), "usual")

    def plan(
        self, problem: int, configuration: Any, device: Device, *, allow_defects: bool = False
    ) -> LaunchPlan:
        if configuration.most != self.most and self.error is not None and not allow_defects:
            raise self.error
        return super().plan(problem, configuration.most, device, allow_defects=allow_defects)


@pytest.mark.parametrize(
    ("error", "defect"),
    [
        (BuildError("it does not compile\nlog"), False),
        (InputError("no"), False),
        (DeviceError("too much shared memory"), False),
        (ZeroDivisionError("division by zero"), False),
        (KernelDefectError("spills"), False),
        (KernelDefectError("spills"), True),
    ],
)
def test_a_tuned_configuration_that_cannot_be_planned_is_as_if_it_were_not_there(
    error: Exception, defect: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    user_folder().mkdir(parents=True)
    tuned: Tuned[int] = Tuned(
        "test", {Kind.ANY: Most}, {Kind.ANY: {"most": 1}}, {Kind.ANY: ("attention_small.cu",)}, lambda _: {}
    )
    (user_folder() / "t.toml").write_text(
        f"""schema_version = 1
        [[entry]]
        kernel = "test.any"
        digest = "{tuned.digest("test.any")}"
        device = "A GPU"
        multiprocessors = 132
        settings = {{ most = 5 }}
        ratio = 1.05
        interval = [1.03, 1.07]
        """
    )
    gpu = Device(0, "sm_90", 132, 50 << 20, name="A GPU")
    kernel = Tunable(Kind.ANY, 100, defect=defect, error=error)
    chosen = selection(Kernel(Kind.FAST, 0), kernel, tuned=tuned)
    refresh()
    try:
        assert chosen.select(1, gpu).configuration == Most(5)
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            for _ in range(2):
                kernel.planned.clear()
                assert chosen.plan(1, gpu).workspace_bytes == 100
                assert kernel.planned[-1] is defect
    finally:
        refresh()
    assert sum("is passed over" in str(each.message) for each in record) == 1
