"""Which file systems root mounted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from iaprof.basics import mounts
from iaprof.basics.mounts import RootsMounts

TABLE = rb"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
36 22 0:40 / /data rw - fuse.mergerfs a:b rw,user_id=0,group_id=0,allow_other
37 22 0:41 / /home/u/remote rw,nosuid - fuse.sshfs host: rw,user_id=1000,group_id=1000
38 22 0:42 / /mnt/with\040space\040-\040fuse\040x rw - overlay overlay rw,lowerdir=/a,upperdir=/user_id=7
39 22 0:43 / /odd rw - fuse none rw,user_id=01
40 22 0:44 / /mnt/virtio rw - virtiofs tag rw
41 22 0:45 / /mnt/n rw - fuseblk /dev/sdb1 rw,user_id=0,group_id=0
42 22 0:46 / /old rw - ext3 /dev/x
"""


def device(major: int, minor: int) -> int:
    return major << 32 | minor


def test_file_systems_of_users_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_bytes(TABLE)
    monkeypatch.setattr(mounts, "_TABLES", (str(tmp_path / "mountinfo"), str(tmp_path / "none")))
    found = RootsMounts()
    assert [minor for minor in range(39, 48) if found.has(device(0, minor))] == [40, 42, 44, 45]
    assert found.has(device(254, 0))
    assert not found.has(device(254, 1))
    # and those that wait for a disk at most
    assert not found.may_wait(device(254, 0))
    assert found.may_wait(device(0, 40))
    assert found.may_wait(device(254, 1))


def test_the_file_system_of_proc_is_roots() -> None:
    status = os.stat("/proc/self")
    found = RootsMounts()
    for _ in range(2):
        assert found.has(device(os.major(status.st_dev), os.minor(status.st_dev)))


def test_files_in_memory_wait_for_nobody() -> None:
    with open(os.memfd_create("text"), "rb") as file:
        status = os.fstat(file.fileno())
    found = RootsMounts()
    assert found.has(device(os.major(status.st_dev), os.minor(status.st_dev)))
    assert not found.may_wait(device(os.major(status.st_dev), os.minor(status.st_dev)))
