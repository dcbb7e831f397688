"""The uid of a pod, from cgroups as kubelet names them, and as strangers do."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, strategies as st

from iaprof.report.fleet.mapping import pod

UID = "2b801b7a-8f4f-4b23-8b44-d1c3e4a0c7c5"
IN_SLICE = UID.replace("-", "_")
STATIC = "0123456789abcdef" * 2
ID = "3f2504e04f8911d39a0c0305e82c3301" * 2


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        (f"/kubepods/besteffort/pod{UID}/{ID}", UID),
        (f"/kubepods/burstable/pod{UID}", UID),
        (f"/kubepods/pod{STATIC}/{ID}", STATIC),
        (f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{IN_SLICE}.slice/crio-{ID}.scope", UID),
        (f"/kubepods.slice/kubepods-pod{IN_SLICE}.slice/crio-{ID}.scope/init", UID),
        (f"/docker/{ID}/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{IN_SLICE}.slice/{ID}", UID),
        (f"/kubepods/pod{STATIC}/{ID}/kubepods/burstable/pod{UID}/{ID}", UID),
        (f"/kubepods/pod{STATIC}/{ID}/kubelet-kubepods-pod{IN_SLICE}.slice/{ID}", UID),
        (f"/kubelet-kubepods-pod{IN_SLICE}.slice/{ID}/kubepods/pod{STATIC}/{ID}", STATIC),
        # none
        ("/", None),
        (f"/docker/{ID}", None),
        (f"/pod{UID}/{ID}", None),
        (f"/besteffort/pod{UID}", None),
        (f"/kubepods/pod{UID}0", None),
        (f"/kubepods/pod{UID.upper()}", None),
        (f"/kubepods/evil/pod{UID}", None),
        (f"/kubepods-pod{IN_SLICE}.slice.evil", None),
        (f"/xkubepods/pod{UID}", None),
        ("/kubepods/pod../../etc", None),
        (f"/kubepods/pod{UID}\n", None),
        ("/" + "kubepods/" * 1000 + f"pod{UID}", None),
    ],
)  # fmt: skip
def test_pod_of_a_cgroup(cgroup: str, expected: str | None) -> None:
    assert pod(cgroup) == expected


@given(st.lists(st.sampled_from(["/", "kubepods", "-", "pod", UID, IN_SLICE, ".slice", "burstable", "\n", "é", "0"])))
def test_whatever_a_cgroup_is_named(parts: list[str]) -> None:
    assert pod("".join(parts)) in (None, UID)


def test_odd_names_take_no_time() -> None:
    began = time.process_time()
    for text in ("kubepods/" * 450, "kubepods-" * 450, "a-" * 1000 + "kubepods-pod", "/kubepods/pod" + "0" * 4000):
        pod(text)
    assert time.process_time() - began < 10
