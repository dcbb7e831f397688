"""Who is answerable for a process, whatever user ID it has."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from iaprof.bpf import accounts
from iaprof.bpf.accounts import Accounts, Places, describe

ID = "3f2504e04f8911d39a0c0305e82c3301" * 2
NOBODY = 65534
HERE = os.getpid()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with /etc's files and the folders of cgroups."""
    for name in ("SUBORDINATE", "USERS", "CGROUPS"):
        monkeypatch.setattr(accounts, name, tmp_path / name)
    (tmp_path / "USERS").write_text("root:x:0:0::/root:/bin/sh\nada:x:1000:1000::/:/bin/sh\nbroken\nodd:x:y:0::/:\n")
    (tmp_path / "SUBORDINATE").write_text("root:1000000:65536\nada:100000:65536\n1001:165536:10\nldap:200000:5\n:7:\n")
    return tmp_path


def test_subordinate_users_are_their_users(files: Path) -> None:
    of = Accounts().of_user
    assert {of(1000), of(100_000), of(165_535)} == {"user 1000"}
    assert {of(1001), of(165_536), of(165_545)} == {"user 1001"}
    assert (of(0), of(99_999), of(165_546), of(4_000_000_000)) == (
        "user 0", "user 99999", "user 165546", "user 4000000000",
    )  # fmt: skip
    assert of(200_004) == "subordinate users of ldap"
    assert of(1_000_000) == "subordinate users of root"


def test_ranges_that_are_added_later_are_seen(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "_LOOK_AGAIN_S", 0)
    found = Accounts()
    assert found.of_user(300_000) == "user 300000"
    with (files / "SUBORDINATE").open("a") as file:
        file.write("1001:300000:1\n")
    assert found.of_user(300_000) == "user 1001"
    (files / "SUBORDINATE").unlink()
    assert found.of_user(300_000) == "user 300000"


@pytest.mark.root
@pytest.mark.parametrize(
    ("cgroup", "owner", "expected"),
    [
        (f"/system.slice/docker-{ID}.scope", 0, f"container /system.slice/docker-{ID}.scope"),
        (f"/docker/{ID}/docker/{ID[::-1]}", 0, f"container /docker/{ID}"),
        ("/lxc.payload.web/init.scope", 0, "container /lxc.payload.web"),
        # whoever may make cgroups can name one so
        (f"/user.slice/docker-{ID}.scope", 1000, "user 1000"),
        (f"/nowhere/docker-{ID}.scope", None, "user 1000"),
        (f"/../../docker-{ID}.scope", 0, "user 1000"),
        ("/user.slice/session-2.scope", 0, "user 1000"),
    ],
)
def test_containers_of_root_are_one(
    files: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, owner: int | None, expected: str
) -> None:
    monkeypatch.setattr(accounts, "cgroup_of", lambda _: cgroup)
    if owner is not None:
        made = Path(f"{files / 'CGROUPS' / 'unified'}{cgroup}")
        made.mkdir(parents=True)
        for folder in (made, *made.parents):
            if folder != files and files in folder.parents:
                os.chown(folder, owner, owner)
    found = Accounts()
    # whatever user a process in it has
    assert found.of_process(HERE, 1000) == expected
    if expected.startswith("container"):
        assert found.of_process(HERE, 4242) == expected


INSIDE = """
import ctypes, os, sys, time
user = int(sys.argv[1])
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
assert ctypes.CDLL(None, use_errno=True).unshare(0x10000000) == 0  # CLONE_NEWUSER
print("out", flush=True)
sys.stdin.readline()
os.setresgid(7, 7, 7)
os.setresuid(7, 7, 7)
print("in", flush=True)
time.sleep(600)
"""


@contextmanager
def in_namespace_of(user: int) -> Iterator[int]:
    """A process as user 7 of a namespace that `user` made, which is user 700,007 outside, as newuidmap allows it."""
    words = ["/usr/bin/python3", "-I", "-c", INSIDE, str(user)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            assert process.stdout.readline() == "out\n"
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{process.pid}/{name}").write_text("0 700000 100\n")
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "in\n"
            yield process.pid
        finally:
            process.kill()


@pytest.mark.root
def test_a_user_namespace_is_its_makers(files: Path) -> None:
    with in_namespace_of(NOBODY) as pid:
        uid = describe(pid)["uid"]
        assert uid == 700_007
        assert Accounts().of_process(pid, 700_007) == f"user {NOBODY}"
        assert describe(pid)["account"] == f"user {NOBODY}"


@pytest.mark.root
def test_a_namespace_in_a_namespace_is_its_outermost_makers(files: Path) -> None:
    again = ["unshare", "-Ur", "sh", "-c", "echo in; exec sleep 600"]
    with (
        in_namespace_of(NOBODY) as pid,
        subprocess.Popen(
            ["nsenter", "-U", "-t", str(pid), "-S", "5", "-G", "5", *again], stdout=subprocess.PIPE
        ) as nested,
    ):
        assert nested.stdout is not None
        assert nested.stdout.readline() == b"in\n"
        assert Accounts().of_process(nested.pid, 700_005) == f"user {NOBODY}"
        nested.kill()


@pytest.mark.root
def test_a_namespace_that_root_made_is_one(files: Path) -> None:
    with in_namespace_of(0) as pid:
        inode = os.stat(f"/proc/{pid}/ns/user").st_ino
        assert Accounts().of_process(pid, 700_007) == f"user namespace {inode}"


def test_ended_processes_are_no_running_ones(files: Path) -> None:
    # a container's process may have had any other user's ID
    assert Accounts().of_process(1 << 30, 100_001) == "user 1000 (ended processes)"


def test_one_account_leaves_places_to_others() -> None:
    places = Places(64, 16)

    def take_all(account: str) -> int:
        number = 0
        while not places.refusal(account):
            places.take(account)
            number += 1
        return number

    assert [take_all(name) for name in ("a", "b", "c", "d", "e")] == [16, 16, 16, 2, 2]
    assert places.refusal("a") == "a has 16 already, which is the maximum"
    kept = "of all users already, and the rest is kept for users that have few"
    assert places.refusal("e") == f"there are 52 {kept}"
    assert sum(take_all(f"user {number}") for number in range(20)) == 12
    assert (
        places.refusal("another") == "there are 64 of all users already, and the rest is kept for users that have few"
    )
    places.give_back("a")
    assert take_all("new") == 1
