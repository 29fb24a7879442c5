"""Confining a process in which somebody else's code runs: Linux's Landlock, seccomp and limits, through ctypes alone.

Two steps, each for good and for all children. `confine`: only named paths can be read, one can be written to, TCP, signals and
abstract sockets stay inside, and no file, address space or processor time grows beyond a limit. `lock`: nothing can be
started any more, forked, traced, connected or sent a signal; who tries is killed (SIGSYS). Landlock holds TCP from Linux 6.7 on,
signals and abstract sockets from 6.12 on; on an older one, `lock` alone does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import stat
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# linux/landlock.h
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
READ, OF_FILES = EXECUTE | READ_FILE | READ_DIR, EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # ABI -> how many rights on files it knows
TCP, SCOPES = 3, 3  # bind and connect; abstract sockets and signals
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
NO_NEW_PRIVS, PARENT_DEATH, SET_SECCOMP = 38, 1, 22  # linux/prctl.h

# linux/seccomp.h, linux/filter.h
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, EQUAL, SET, RETURN = 0x20, 0x15, 0x45, 0x06  # BPF: load a word; jump if equal; jump if a bit is set; return
THREAD = 0x00010000  # CLONE_THREAD
F_SETOWN, F_SETOWN_EX = 8, 15


@dataclass(frozen=True)
class Machine:
    """Numbers of system calls on one architecture."""

    audit: int
    killed: tuple[int, ...]
    clone: int
    clone3: int
    limits: tuple[int, ...]  # refused without harm: raising one's own limits
    tgkill: int  # allowed within the process: abort() and the emulator need it
    fcntl: int  # allowed but for F_SETOWN and F_SETOWN_EX, by which a file sends signals to others


# execve, execveat, fork, vfork, socket, socketpair, ptrace, process_vm_readv, process_vm_writev, kill, unshare, setns, mount, bpf,
# perf_event_open, userfaultfd, io_uring_setup, pidfd_open, pidfd_getfd, pidfd_send_signal, keyctl, add_key, tkill, rt_sigqueueinfo,
# rt_tgsigqueueinfo
MACHINES = {
    "x86_64": Machine(
        0xC000003E,
        (59, 322, 57, 58, 41, 53, 101, 310, 311, 62, 272, 308, 165, 321, 298, 323, 425, 434, 438, 424, 250, 248)
        + (200, 129, 297),
        56,
        435,
        (160,),
        234,
        72,
    ),
    "aarch64": Machine(
        0xC00000B7,
        (221, 281, 198, 199, 117, 270, 271, 129, 97, 268, 40, 280, 241, 282, 425, 434, 438, 424, 219, 217)
        + (130, 138, 240),
        220,
        435,
        (164,),
        131,
        25,
    ),
}
PRLIMIT = {"x86_64": 302, "aarch64": 261}


@dataclass(frozen=True)
class Limits:
    """Processor seconds, bytes of address space beyond what is there already, bytes of a file, open files."""

    seconds: int = 120
    memory: int = 3 << 30
    file: int = 256 << 20
    files: int = 256


def refusal() -> str:
    """Why nobody can be confined here, in a sentence; empty if it can be done."""
    if sys.platform != "linux":
        return f"grading needs a sandbox, which is Linux's Landlock; this is {sys.platform}: grade in a Linux container or on a Linux machine"
    if platform.machine() not in MACHINES:
        return f"grading needs a sandbox, which is made for {' and '.join(MACHINES)}; this is {platform.machine()}"
    if _abi() < 1:
        return "grading needs a sandbox, and this kernel has no Landlock (Linux 5.13 with CONFIG_SECURITY_LANDLOCK, not blocked by a container)"
    return ""


def confine(readable: Iterable[Path], writable: Path, limits: Limits) -> None:
    """From here on this process and its children read only below `readable` and `writable`, write only below `writable`, and keep to
    the limits. Paths that don't exist are left out. RuntimeError if there is no sandbox here, OSError if the kernel refuses."""
    if reason := refusal():
        raise RuntimeError(reason)
    libc, abi = _libc(), _abi()
    _sizes()
    rights = (1 << RIGHTS.get(abi, 16)) - 1
    fields = [rights] + [TCP] * (abi >= 4) + [SCOPES] * (abi >= 6)
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    _call(libc.prctl(PARENT_DEATH, 9, 0, 0, 0))
    ruleset = _call(libc.syscall(CREATE_RULESET, attributes, len(attributes), 0))
    for path, allowed in [
        *((path, READ) for path in readable),
        (writable, rights),
        (Path("/dev/null"), READ | WRITE_FILE),
    ]:
        _allow(libc, ruleset, path, allowed & rights)
    _call(libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0))
    _call(libc.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)
    limit(limits)


def limit(limits: Limits) -> None:
    """Sets the limits of this process; they can only become narrower."""
    sizes = {
        resource.RLIMIT_AS: _address_space() + limits.memory,
        resource.RLIMIT_CPU: int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + limits.seconds,
        resource.RLIMIT_FSIZE: limits.file,
        resource.RLIMIT_NOFILE: limits.files,
        resource.RLIMIT_CORE: 0,
    }
    for which, size in sizes.items():
        _, most = resource.getrlimit(which)
        size = size if most == resource.RLIM_INFINITY else min(size, most)
        resource.setrlimit(which, (size, size))


def lock() -> None:
    """From here on this process starts and reaches nobody but itself. After `confine`; OSError if the kernel refuses."""
    libc, machine = _libc(), MACHINES[platform.machine()]
    # (code, jump if true, jump if false, value). The words of seccomp_data: 0 call, 4 architecture, 16 and 24 first two arguments.
    program = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, machine.audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if platform.machine() == "x86_64":
        program += [(SET, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]  # the x32 calls have this bit
    for call in machine.killed:
        program += [(EQUAL, 0, 1, call), (RETURN, 0, 0, KILL)]
    for call in machine.limits:
        program += [(EQUAL, 0, 1, call), (RETURN, 0, 0, REFUSE | errno.EPERM)]
    program += [(EQUAL, 0, 1, machine.clone3), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]  # then libc takes clone
    program += [
        (EQUAL, 0, 3, machine.clone),
        (LOAD, 0, 0, 16),
        (SET, 1, 0, THREAD),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),
    ]
    program += [
        (EQUAL, 0, 4, machine.tgkill),
        (LOAD, 0, 0, 16),
        (EQUAL, 1, 0, os.getpid()),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),
    ]
    program += [
        (EQUAL, 0, 5, machine.fcntl),
        (LOAD, 0, 0, 24),
        (EQUAL, 1, 0, F_SETOWN),
        (EQUAL, 0, 1, F_SETOWN_EX),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),
    ]
    # prlimit64 may read limits (no new ones, a null pointer), not set them
    limits = [
        (LOAD, 0, 0, 32),
        (EQUAL, 0, 2, 0),
        (LOAD, 0, 0, 36),
        (EQUAL, 1, 0, 0),
        (RETURN, 0, 0, REFUSE | errno.EPERM),
    ]
    program += [(EQUAL, 0, len(limits), PRLIMIT[platform.machine()]), *limits, (RETURN, 0, 0, ALLOW)]
    code = b"".join(struct.pack("=HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    pointer = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(buffer)))
    _call(libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0))
    _call(libc.prctl(SET_SECCOMP, 2, ctypes.byref(pointer), 0, 0))


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


def _abi() -> int:
    """The Landlock that this kernel has; negative if none."""
    return _libc().syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))


def _allow(libc: ctypes.CDLL, ruleset: int, path: Path, allowed: int) -> None:
    try:
        there = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(there).st_mode):
            allowed &= OF_FILES
        rule = struct.pack("=Qi", allowed, there)
        _call(libc.syscall(ADD_RULE, ruleset, 1, rule, 0))
    finally:
        os.close(there)


@cache
def _sizes() -> int:
    """The file that tells this process's sizes, opened while it can be; a child that is forked is as large."""
    return os.open("/proc/self/statm", os.O_RDONLY)


def _address_space() -> int:
    return int(os.pread(_sizes(), 100, 0).split()[0]) * resource.getpagesize()


def _call(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"the sandbox could not be made: {os.strerror(code)}")
    return result
