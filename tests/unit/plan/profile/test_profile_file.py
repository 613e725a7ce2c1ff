"""Files of profiles: what is written is read again, and damage is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from merak.core.errors import PlanError
from merak.plan.cost.calibration import Curve
from merak.plan.profile.merge import merge_profiles
from merak.plan.profile.profile import HOST, LinkTimes, differences
from merak.plan.profile.profile_file import (
    is_profile,
    load_profile,
    profile_from,
    profile_text,
    save_profile,
)
from tests.unit.plan.profile.helpers import MACHINE, line, profile, segment


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(path, profile())
    assert is_profile(path)
    assert load_profile(path) == profile()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merak_profile": 7}, "x is a profile of version 7, but this Merak reads 1; run"),
        ({"copies": []}, "x is a damaged profile .ValueError: a curve without points.; run"),
        ({"copies": [[1, -1]]}, "x is a damaged profile .ValueError: -1 is too small.; run"),
        ({"hosts": {"a": 0}}, "x is a damaged profile .ValueError: 0 is no count.; run"),
        ({"machine": {"device": "a"}}, "x is a damaged profile .TypeError.*; run"),
        ({"links": [{"kind": "road", "senders": 1, "seconds": [[1, 1]]}]}, "kind='road' of a link"),
    ],
)
def test_damage_is_refused(change: dict[str, Any], message: str) -> None:
    content = json.loads(profile_text(profile())) | change
    with pytest.raises(PlanError, match=message):
        profile_from(json.dumps(content), "x")


def test_other_files_are_no_profiles(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot be read \(No such file or directory\); name a"):
        load_profile(tmp_path / "none.json")
    with pytest.raises(PlanError, match="x is no profile; name a file"):
        profile_from("{}", "x")
    with pytest.raises(PlanError, match="x is not JSON"):
        profile_from("nodes:", "x")
    assert not is_profile(tmp_path / "none.json")


def test_a_profile_of_other_hardware_or_torch_warns() -> None:
    assert differences(profile(), "Some CPU", "2.13.0") == []
    assert differences(profile(), None, "2.13.0") == []
    device, torch = differences(profile(), "NVIDIA H100", "2.14.0")
    assert device == (
        "The profile is of 'Some CPU', but the device here is 'NVIDIA H100'; run `merak profile` "
        "here for its own figures."
    )
    assert torch.startswith("The profile was measured with torch 2.13.0, but this is torch 2.14.0")


def test_merging_keeps_the_last_of_equal_figures() -> None:
    other = profile(
        hosts=(("b", 4), ("c", 2)),
        copies=Curve(((1e4, 9e-6), (1e6, 1e-4))),
        links=(LinkTimes(HOST, 4, line(1e-6, 1e9)),),
        segments=(segment("two", "kind", 4e6, 5e-3), segment("three", "kind", 8e6, 8e-3)),
        collectives=(),
        interference=((HOST, 0.1),),
    )
    merged = merge_profiles([profile(), other])
    assert dict(merged.hosts) == {"a": 2, "b": 4, "c": 2}
    assert merged.copies.points == ((1e4, 9e-6), (1e6, 1e-4), (1e8, 1e-2))
    assert [own.senders for own in merged.links] == [2, 1, 2, 4]
    assert merged.collectives == profile().collectives
    assert dict(merged.interference) == {HOST: 0.1}
    assert {row.digest: row.seconds.forward_s for row in merged.segments} == {
        "one": 1e-3,
        "two": 5e-3,
        "three": 8e-3,
    }


@pytest.mark.parametrize("name", ["device", "torch", "backend"])
def test_profiles_of_other_devices_do_not_merge(name: str) -> None:
    other = profile(machine=replace(MACHINE, **{name: "other"}))
    with pytest.raises(PlanError, match=f"have {name}='.*' and {name}='other', whose figures"):
        merge_profiles([profile(), other])
