"""What /proc/PID/cgroup says of a container, as the runtimes write it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from iaprof.bpf import accounts
from iaprof.bpf.accounts import container, describe

ID = "3f2504e04f8911d39a0c0305e82c3301" * 2
OTHER = "0123456789abcdef" * 4
POD = "kubepods-besteffort-pod2b801b7a_8f4f_4b23_8b44_d1c3e4a0c7c5.slice"


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        (f"/docker/{ID}", ID),
        (f"/system.slice/docker-{ID}.scope", ID),
        (f"/system.slice/docker-{ID}.scope/init.scope", ID),
        (f"/kubepods/besteffort/pod2b801b7a-8f4f-4b23-8b44-d1c3e4a0c7c5/{ID}", ID),
        (f"/kubepods.slice/kubepods-besteffort.slice/{POD}/cri-containerd-{ID}.scope", ID),
        (f"/kubepods.slice/kubepods-besteffort.slice/{POD}/crio-{ID}.scope", ID),
        (f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container", ID),
        (f"/machine.slice/libpod-conmon-{ID}.scope", None),
        (f"/docker/{OTHER}/docker/{ID}", ID),
        ("/lxc/web", "web"),
        ("/lxc.payload.web/system.slice/ssh.service", "web"),
        ("/lxc.monitor.web", None),
        ("/user.slice/user-1000.slice/session-2.scope", None),
        (f"/system.slice/{ID[:-1]}.scope", None),
        (f"/system.slice/{ID}0", None),
        ("/lxc/" + "x" * 65, None),
        ("/", None),
    ],
)
def test_container_of_a_cgroup(cgroup: str, expected: str | None) -> None:
    assert container(cgroup) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"0::/system.slice/docker-{ID}.scope\n", f"/system.slice/docker-{ID}.scope"),
        ("0::/\n", None),
        ("", None),
        # v1, and v1 with an unused v2 beside it: the hierarchy that says most
        (f"4:memory:/docker/{ID}\n3:cpuset:/\n1:name=systemd:/docker/{ID}/init\n", f"/docker/{ID}/init"),
        (f"4:memory:/docker/{ID}\n0::/\n", f"/docker/{ID}"),
        # v2, and v1 hierarchies of something else beside it
        (f"4:memory:/a/much/longer/path/{ID}{ID}\n0::/docker/{ID}\n", f"/docker/{ID}"),
        # a name with what separates fields
        ("0::/a:b/c::d\n", "/a:b/c::d"),
        ("nonsense", None),
        (":::\n\n0\n", None),
    ],
)
def test_cgroup_of_a_process(monkeypatch: pytest.MonkeyPatch, text: str, expected: str | None) -> None:
    monkeypatch.setattr(accounts, "_read", lambda pid, name: text.encode() if name == "cgroup" else b"")
    assert describe(1)["cgroup"] == expected


def test_pids_and_odd_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a name that pretends to be a line of the file, and a cgroup that is not a text
    texts = {
        "status": b"Name:\tNSpid:\t9\nNgid:\t0\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nNSpid:\t3000\t41\t7\n",
        "cgroup": b"0::/\xff\xfe\x1b[2J\n",
    }
    monkeypatch.setattr(accounts, "_read", lambda pid, name: texts[name])
    # when
    described = describe(3000)
    # then
    expected = {"pid": 3000, "ns_pid": 7, "cgroup": "/\\xff\\xfe\x1b[2J", "container": None, "uid": 1, "gid": 5}
    assert json.loads(json.dumps(described)) == described
    assert str(described.pop("account")).startswith("user 1")
    assert described == expected


@pytest.mark.parametrize(("ids", "expected"), [("1000\t0\t0\t0", 1000), ("0\t7\t0\t7", 7), ("0\t0\t0\t0", 0)])
def test_whose_rights_a_set_user_id_program_has(monkeypatch: pytest.MonkeyPatch, ids: str, expected: int) -> None:
    monkeypatch.setattr(accounts, "_read", lambda pid, name: f"Uid:\t{ids}\nGid:\t{ids}\n".encode())
    assert (describe(1)["uid"], describe(1)["gid"]) == (expected, expected)


def test_this_process_and_one_that_is_gone() -> None:
    described = describe(os.getpid())
    assert described["pid"] == os.getpid()
    lines = Path("/proc/self/status").read_text().splitlines()
    inside = next(line.split()[1:] for line in lines if line.startswith("NSpid:"))
    assert described["ns_pid"] == (int(inside[-1]) if len(inside) > 1 else None)
    process = subprocess.Popen(["true"])
    process.wait()
    assert (described["uid"], described["gid"]) == (os.geteuid(), os.getegid())
    nothing = dict.fromkeys(("ns_pid", "cgroup", "container", "uid", "gid", "account"))
    assert describe(process.pid) == {"pid": process.pid, **nothing}
