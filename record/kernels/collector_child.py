"""The child process that opens files that recorded processes name: a bare sandbox.worker.Worker.

The recorder is root and anyone can choose the path, so the file is opened as its process would open it: below that
process's root, as the user and group that the kernel saw when the probe fired, without further capabilities. A file
system in user space can make any of these calls hang: that hangs this process only, which the recorder replaces.

Requests come on its SOCK_SEQPACKET channel: JSON, and perhaps the descriptor of a root folder. Each answer is JSON and,
on success, a descriptor: of a memory file with the content or, if the request says `open`, of the file itself. This
process imports nothing large, as it is started again after each hang.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import mmap
import os
import socket
import stat
import struct
from typing import Any

MAX_ELF_BYTES = 256 << 20
ABSENT, ANOTHER = "it is not there (any more)", "the file there is not the one that was mapped"
FORBIDDEN, NOT_REGULAR = "Permission denied", "it is not a regular file"
_EM_INTELGT = 205
_SYS_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_RESOLVE_IN_ROOT = 0x10
_CHUNK = 1 << 20


class Refused(Exception):
    """The file is refused; the text says why."""


def _open_below(folder: int, path: bytes) -> int:
    """Returns an O_PATH descriptor: opening so neither blocks nor has effects, even on a device or FIFO.

    The folder is the process's root for an absolute path. For a relative one it is the process's working directory, and
    a path that leaves that is refused: openat2 cannot be given both folders.
    """
    return _openat2(folder, path, _RESOLVE_IN_ROOT if path.startswith(b"/") else _RESOLVE_BENEATH)


def _openat2(folder: int, path: bytes, resolve: int, flags: int = 0) -> int:
    flags |= os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    how = struct.pack("<QQQ", flags, 0, resolve | _RESOLVE_NO_MAGICLINKS)
    if b"\0" in path:  # the system call would open what the bytes before it name
        raise Refused("its path has a zero byte")
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.syscall(ctypes.c_long(_SYS_OPENAT2), folder, ctypes.c_char_p(path), how, ctypes.c_size_t(len(how)))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def _take(path_fd: int) -> tuple[int, str, int]:
    """Copies the file behind an O_PATH descriptor; returns a memory file, its SHA-256 and its size."""
    status = os.fstat(path_fd)
    if not stat.S_ISREG(status.st_mode):
        raise Refused(NOT_REGULAR)
    if status.st_size > MAX_ELF_BYTES:
        raise Refused(f"it is larger than {MAX_ELF_BYTES >> 20} MiB")
    source = os.open(f"/proc/self/fd/{path_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    memory = os.memfd_create("elf", os.MFD_CLOEXEC)
    try:
        digest, size = hashlib.sha256(), 0
        while chunk := os.read(source, _CHUNK):
            if size == 0:
                _check_start(chunk)
            size += len(chunk)
            if size > MAX_ELF_BYTES:  # it grew while it was read
                raise Refused(f"it is larger than {MAX_ELF_BYTES >> 20} MiB")
            digest.update(chunk)
            unwritten = memoryview(chunk)
            while unwritten:
                unwritten = unwritten[os.write(memory, unwritten) :]
        if size == 0:
            raise Refused("it is empty")
        if size < status.st_size:
            raise Refused("it became shorter while it was read")
        return memory, digest.hexdigest(), size
    except BaseException:
        os.close(memory)
        raise
    finally:
        os.close(source)


def _check_start(chunk: bytes) -> None:
    if chunk[:6] != b"\x7fELF\x02\x01" or len(chunk) < 20:
        raise Refused("it is not a 64-bit little-endian ELF file")
    if struct.unpack_from("<H", chunk, 18)[0] != _EM_INTELGT:
        raise Refused("it is an ELF file, but not for an Intel GPU")


def _open(path_fd: int, owner: int | None, same: list[int] | None) -> int:
    """Opens the file behind an O_PATH descriptor for reading; refuses all but regular files of `owner`.

    With `same` it must be the file of that device and inode, and unchanged from that time on. A reason is about that
    file: if another one cannot be opened, the reason is that it is another one.
    """
    try:
        file = _open_regular(path_fd, owner)
    except (Refused, OSError):
        if same is not None and _identity(path_fd) != (same[0], same[1]):
            raise Refused(ANOTHER) from None
        raise
    try:
        if same is not None:
            _check_same(file, *same)
    except BaseException:
        os.close(file)
        raise
    return file


def _check_same(file: int, device: int, inode: int, before_ns: int) -> None:
    if _identity(file) != (device, inode) and _as_mapped(file) != (device, inode):
        raise Refused(ANOTHER)
    status = os.fstat(file)
    # Deleting a file sets its ctime: then only the last write counts.
    changed = status.st_ctime_ns if status.st_nlink else status.st_mtime_ns
    if changed >= before_ns:
        raise Refused("it was changed since it was mapped, or just before")


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return os.major(status.st_dev) << 32 | os.minor(status.st_dev), status.st_ino


def _as_mapped(file: int) -> tuple[int, int] | None:
    """Returns device and inode as in /proc/PID/maps: on overlayfs and btrfs they differ from fstat's."""
    try:
        content = mmap.mmap(file, 1, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    except ValueError:  # it is empty
        return None
    with content:
        view = ctypes.c_char.from_buffer(content)
        start = b"%x-" % ctypes.addressof(view)
        del view
        with open("/proc/self/maps", "rb") as maps:
            words = next((line.split() for line in maps if line.lstrip(b"0").startswith(start)), None)
    if words is None:
        return None
    major, minor = words[3].split(b":")
    return int(major, 16) << 32 | int(minor, 16), int(words[4])


def _open_regular(path_fd: int, owner: int | None) -> int:
    status = os.fstat(path_fd)
    if not stat.S_ISREG(status.st_mode):
        raise Refused(NOT_REGULAR)
    if owner is not None and status.st_uid != owner:
        raise Refused("it belongs to another user than its process")
    return os.open(f"/proc/self/fd/{path_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def _folder_of(pid: int, path: bytes, ours: bool) -> int:
    """Opens the folder where a process's path starts; for a file in the recorder's own folder, even if it has ended."""
    below = "root" if path.startswith(b"/") else "cwd"
    try:
        return os.open(f"/proc/{pid}/{below}", os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        if not ours:
            raise
        return os.open("/", os.O_PATH | os.O_CLOEXEC)


def _serve(request: dict[str, Any], root: int | None) -> tuple[dict[str, Any], int | None]:
    libc = ctypes.CDLL(None, use_errno=True)
    pid, uid, gid = int(request["pid"]), int(request["uid"]), int(request["gid"])
    path = bytes.fromhex(request.get("path", ""))
    opened: list[int] = []
    try:
        if "mapped" in request:  # the mapped file itself, wherever its path leads now
            opened.append(os.open(f"/proc/{pid}/map_files/{request['mapped']}", os.O_PATH | os.O_CLOEXEC))
        elif root is not None:
            opened.append(os.dup(root))
        elif "below" in request:  # strangers may have replaced parts of this path: no links are followed
            opened.append(_openat2(-1, bytes.fromhex(request["below"]), _RESOLVE_NO_SYMLINKS, os.O_DIRECTORY))
        elif pid:
            opened.append(_folder_of(pid, path, bool(request.get("ours"))))
        else:  # the process has ended: our root may be like the one it had
            opened.append(os.open("/", os.O_PATH | os.O_CLOEXEC))
        # setfsuid changes only which files may be opened, and drops the file capabilities. Copying the content to
        # memory afterwards needs no rights.
        if os.geteuid() == 0:
            os.setgroups([])
            libc.setfsgid(gid)
            libc.setfsuid(uid)
            if libc.setfsuid(-1) != uid:  # -1 changes nothing and returns the current one
                raise Refused("its user's rights could not be taken on")
        if "mapped" not in request:
            opened.append(_open_below(opened[0], path))
        if request.get("open"):
            return {}, _open(opened[-1], request.get("owner"), request.get("same"))
        memory, digest, size = _take(opened[-1])
        return {"digest": digest, "size": size}, memory
    except Refused as refusal:
        return {"refused": str(refusal)}, None
    except OSError as error:
        reason = {
            errno.ELOOP: "it is a symbolic link",
            errno.ENOENT: ABSENT,
            errno.ESRCH: ABSENT,  # its process ended
            errno.EACCES: FORBIDDEN,
            errno.EXDEV: "its relative path leaves the folder that the process works in",
        }
        return {"refused": reason.get(error.errno or 0, error.strerror or str(error))}, None
    finally:
        if os.geteuid() == 0:
            libc.setfsuid(0)
            libc.setfsgid(0)
        for fd in opened:
            os.close(fd)


def main() -> None:
    """Serves requests until the recorder closes the channel."""
    os.setpriority(os.PRIO_PROCESS, 0, 0)  # not with the recorder's priority, as anyone can cause its work
    channel = socket.socket(fileno=0)
    while (received := socket.recv_fds(channel, 1 << 16, 1))[0]:
        data, roots = received[:2]
        answer, memory = _serve(json.loads(data), roots[0] if roots else None)
        for fd in roots:
            os.close(fd)
        payload = json.dumps(answer).encode()
        if memory is None:
            channel.send(payload)
        else:
            socket.send_fds(channel, [payload], [memory])
            os.close(memory)
