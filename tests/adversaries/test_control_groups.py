"""A control group goes with the test that made it, whatever fails; folders stand in for the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest
from control_groups import half_a_processor


def test_a_group_that_cannot_be_set_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, text: str) -> int:
        raise PermissionError(path.name)

    monkeypatch.setattr(Path, "write_text", refused)
    with pytest.raises(PermissionError, match="cfs_period_us"), half_a_processor(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_group_that_stays_in_use_is_a_failure_and_no_endless_wait(tmp_path: Path) -> None:
    with (
        pytest.raises(TimeoutError, match=r"cannot be removed after 0\.05 s"),
        half_a_processor(tmp_path, 0.05),
    ):
        pass  # a folder with files in it cannot be removed, as a group with processes in it


def test_no_two_have_one_name(tmp_path: Path) -> None:
    groups: list[Path] = []
    for _ in range(2):
        with half_a_processor(tmp_path) as group:
            groups.append(group)
            for file in group.iterdir():
                file.unlink()
    assert groups[0] != groups[1]
    assert list(tmp_path.iterdir()) == []
