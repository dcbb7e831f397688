"""What a child process gives up before it reads hostile data: root, capabilities, resources, files, system calls."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import stat
import struct
from collections.abc import Mapping, Sequence

NOBODY = 65534
_PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h
_CAPABILITY_VERSION_3 = 0x2008_0522  # linux/capability.h


def give_up_privileges(limits: Mapping[int, int], user: tuple[int, int] = (NOBODY, NOBODY)) -> None:
    """Changes the user from root to nobody or another, drops all capabilities for good, and sets resource limits.

    Call it while the process has only one thread, because other threads would keep their capabilities.

    Args:
        limits: values by resource.RLIMIT_*. Lower limits that are in force stay.
        user: uid and gid, in place of root. If this is root, too, as with sudo in a root shell, it is nobody:
            reading root's files takes no capability.

    Raises:
        OSError: the kernel refuses.
    """
    if os.geteuid() == 0:
        user = user if user[0] else (NOBODY, NOBODY)
        # A user namespace may lack the user nobody; then dropping the capabilities has to suffice.
        with contextlib.suppress(OSError):
            os.setgroups([])
        with contextlib.suppress(OSError):
            os.setresgid(*[user[1]] * 3)
        with contextlib.suppress(OSError):
            os.setresuid(*[user[0]] * 3)
    libc = ctypes.CDLL(None)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))) != 0:
        raise OSError("the kernel refuses PR_SET_NO_NEW_PRIVS")
    if libc.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()) != 0:
        raise OSError("capabilities cannot be given up")
    for kind, limit in limits.items():
        # Also respects the soft limit, as the parent may have limited its own memory to less.
        value = min([limit, *(each for each in resource.getrlimit(kind) if each != resource.RLIM_INFINITY)])
        resource.setrlimit(kind, (value, value))


_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # of all architectures
_PATH_BENEATH = 1  # linux/landlock.h
_EXECUTE, _READ_FILE, _READ_FOLDER = 1, 4, 8
_ALL_ACCESS = (1 << 13) - 1  # what the first version of Landlock knows


def only_read(libc: ctypes.CDLL, paths: Sequence[str], files: Sequence[int]) -> None:
    """Leaves this process no files but those below these paths, to read and to execute, and these open ones, for good.

    Descriptors that are open stay usable. Call it after `give_up_privileges`; where the kernel lacks Landlock, it does
    nothing.
    """
    handled = ctypes.c_uint64(_ALL_ACCESS)
    rules = libc.syscall(ctypes.c_long(_LANDLOCK_CREATE), ctypes.byref(handled), ctypes.c_size_t(8), ctypes.c_uint32(0))
    if rules < 0:
        return
    opened = []
    for path in paths:
        with contextlib.suppress(OSError):
            opened.append(os.open(path, os.O_PATH | os.O_CLOEXEC))
    for file in (*opened, *files):
        allowed = _EXECUTE | _READ_FILE | (_READ_FOLDER if stat.S_ISDIR(os.fstat(file).st_mode) else 0)
        rule = ctypes.create_string_buffer(struct.pack("<Qi", allowed, file))
        libc.syscall(
            ctypes.c_long(_LANDLOCK_ADD), ctypes.c_int(rules), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0)
        )
    libc.syscall(ctypes.c_long(_LANDLOCK_RESTRICT), ctypes.c_int(rules), ctypes.c_uint32(0))
    for file in (rules, *opened):
        os.close(file)


# Numbers of x86-64: linux/arch/x86/entry/syscalls/syscall_64.tbl.
_ALLOWED = {
    "read": 0, "write": 1, "close": 3, "fstat": 5, "poll": 7, "lseek": 8, "mprotect": 10, "munmap": 11, "brk": 12,
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17, "pwrite64": 18, "readv": 19,
    "writev": 20, "sched_yield": 24, "mremap": 25, "madvise": 28, "nanosleep": 35, "setitimer": 38, "getpid": 39,
    "recvfrom": 45, "recvmsg": 47, "exit": 60, "fcntl": 72, "ftruncate": 77, "gettimeofday": 96, "getrusage": 98,
    "sysinfo": 99, "sigaltstack": 131, "gettid": 186, "futex": 202, "sched_getaffinity": 204, "restart_syscall": 219,
    "clock_gettime": 228, "clock_nanosleep": 230, "exit_group": 231,
    "newfstatat": 262,  # newer C libraries implement fstat with it
    "getrandom": 318,
}  # fmt: skip
RUNNING = {
    "stat": 4, "lstat": 6, "access": 21, "dup": 32, "execve": 59, "uname": 63, "getcwd": 79, "readlink": 89,
    "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "sched_get_priority_max": 146,
    "sched_get_priority_min": 147, "arch_prctl": 158, "set_tid_address": 218, "readlinkat": 267, "faccessat": 269,
    "set_robust_list": 273, "execveat": 322, "statx": 332, "rseq": 334, "faccessat2": 439,
}  # fmt: skip
"""The further system calls of a program that is started and reads files."""
_OPEN, _MMAP, _IOCTL, _TGKILL, _OPENAT, _PRLIMIT64, _SECCOMP = 2, 9, 16, 234, 257, 302, 317
_CLONE, _CLONE3, _CLONE_THREAD = 56, 435, 0x10000
# socket, connect, socketpair, fork, vfork, execve, kill, ptrace, setsid, rt_sigqueueinfo, tkill, rt_tgsigqueueinfo,
# process_vm_readv, process_vm_writev, execveat, pidfd_send_signal, io_uring_setup, pidfd_open, pidfd_getfd
_REACHING_OTHERS = (41, 42, 53, 57, 58, 59, 62, 101, 112, 129, 200, 297, 310, 311, 322, 424, 425, 434, 438)
_MAP_SHARED = 1
_TCGETS = 0x5401
_TO_WRITE = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_APPEND | (os.O_TMPFILE & ~os.O_DIRECTORY)

# linux/seccomp.h, linux/audit.h, linux/bpf_common.h
_SET_MODE_FILTER, _FLAG_TSYNC = 1, 1
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF_0000, 0x0005_0001, 0x0005_0026, 0x8000_0000
_ARCH_X86_64 = 0xC000_003E
_X32 = 0x4000_0000
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data


class _Program(ctypes.Structure):
    """struct sock_fprog of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def filter_system_calls(libc: ctypes.CDLL, more: Mapping[str, int] | None = None) -> None:
    """Allows this process only the system calls for reading, computing and answering, for good.

    With `more` it may also make these, and open files to read them: RUNNING, for a process that becomes a program.

    A child that gets descriptors needs open files, so RLIMIT_NOFILE alone cannot keep it from opening files, connecting
    or starting processes. All other calls fail with EPERM, so that a library that makes an unexpected call gets an
    error instead of killing the child. Call it after `give_up_privileges`, or the kernel refuses; if the machine or the
    kernel lacks such filters, it does nothing.
    """
    if os.uname().machine == "x86_64":
        code = _filter_program(os.getpid(), more or {})
        _set_filter(libc, code)


def stay_alone(libc: ctypes.CDLL) -> None:
    """Takes from this process the system calls that start, reach or change others, for good; it may start threads.

    Others that it started could leave its session, and live on. Call it after `give_up_privileges`.
    """
    if os.uname().machine != "x86_64":
        return
    code = _only_of_this_machine()
    for number in _REACHING_OTHERS:
        code += _answer(number, _EPERM)
    code += _answer(_CLONE3, _ENOSYS)  # its flags are in memory, which a filter cannot read: C libraries then use clone
    code += _allow_if(_CLONE, 0, _CLONE_THREAD, _CLONE_THREAD)
    code += _allow_if(_TGKILL, 0, 0xFFFF_FFFF, os.getpid())  # abort() sends a signal to the process itself
    _set_filter(libc, b"".join([*code, _code(_RETURN, _ALLOW)]))


def _set_filter(libc: ctypes.CDLL, code: bytes) -> None:
    program = _Program(len(code) // 8, code)
    numbers = (ctypes.c_long(each) for each in (_SECCOMP, _SET_MODE_FILTER, _FLAG_TSYNC))
    libc.syscall(*numbers, ctypes.byref(program))


def _filter_program(pid: int, more: Mapping[str, int]) -> bytes:
    """Returns the filter in classic BPF, an array of struct sock_filter, for the process with this id."""
    checked = [
        (_MMAP, 3, _MAP_SHARED, 0),  # shared memory would escape the limits
        (_TGKILL, 0, 0xFFFF_FFFF, pid),  # abort() sends a signal to the process itself
        (_PRLIMIT64, 0, 0xFFFF_FFFF, 0),  # limits of this process only
    ]
    if more:
        checked += [(_OPEN, 1, _TO_WRITE, 0), (_OPENAT, 2, _TO_WRITE, 0), (_IOCTL, 1, 0xFFFF_FFFF, _TCGETS)]
    code = _only_of_this_machine()
    for number in (*_ALLOWED.values(), *more.values()):
        code += _answer(number, _ALLOW)
    for each in checked:
        code += _allow_if(*each)
    return b"".join([*code, _code(_RETURN, _EPERM)])


def _only_of_this_machine() -> list[bytes]:
    """Returns a beginning that ends the process at another architecture's calls, and leaves the call's number."""
    return [
        _code(_LOAD, _ARCH),
        _code(_EQUAL, _ARCH_X86_64, 1, 0),
        _code(_RETURN, _KILL),
        _code(_LOAD, _NUMBER),
        _code(_AT_LEAST, _X32, 0, 1),
        _code(_RETURN, _KILL),
    ]


def _answer(number: int, answer: int) -> list[bytes]:
    return [_code(_EQUAL, number, 0, 1), _code(_RETURN, answer)]


def _allow_if(number: int, argument: int, mask: int, wanted: int) -> list[bytes]:
    """Allows a call if this argument, masked, has this value; otherwise it fails with EPERM."""
    return [
        _code(_EQUAL, number, 0, 5),
        _code(_LOAD, _ARGUMENTS + 8 * argument),  # the lower half, as all these arguments are ints
        _code(_AND, mask),
        _code(_EQUAL, wanted, 0, 1),
        _code(_RETURN, _ALLOW),
        _code(_RETURN, _EPERM),
    ]


def _code(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", operation, if_true, if_false, value)
