"""The choice among an operation's kernels, with kernels that need no GPU."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest

from flashmoe_science.cuda.choice import Choice, Selection
from flashmoe_science.cuda.device import Device
from flashmoe_science.cuda.launch import LaunchPlan
from flashmoe_science.errors import InputError, KernelDefectError, NoKernelError
from flashmoe_science.jit.nvrtc import CudaKernel

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
