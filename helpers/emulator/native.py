"""The emulator's runtime library: what Python and C++ say to each other (mirrors ``runtime/exchange.h``)."""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_char_p, c_int, c_int32, c_int64, c_uint32, c_uint64

MAX_DIMS = 8


class Region(ctypes.Structure):
    """A tensor's memory, by which accesses are bounded and counted."""

    _fields_ = [
        ("name", c_char_p),
        ("base", c_uint64),
        ("bytes", c_uint64),
        ("item", c_uint64),
        ("contiguous", c_int32),
        ("dims", c_int32),
        ("given", c_int32),
        ("size", c_int64 * MAX_DIMS),
        ("stride", c_int64 * MAX_DIMS),
    ]


class Fault(ctypes.Structure):
    """What stopped a kernel."""

    _fields_ = [
        ("kind", c_char * 32),
        ("text", c_char * 4096),
        ("file", c_char * 1024),
        ("module", c_char * 1024),
        ("offset", c_uint64),
        ("outer", c_uint64 * 4),
        ("line", c_int32),
        ("error", c_int32),
        ("block", c_uint64),
        ("kernel", c_char * 256),
    ]


class Counter(ctypes.Structure):
    """Bytes that threads asked to read from and to write to one tensor; by_host: whether the launcher's own cudaMemset or
    cudaMemcpy has written to it."""

    _fields_ = [("read", c_uint64), ("written", c_uint64), ("by_host", c_uint64)]


class TraceRow(ctypes.Structure):
    """Warp requests that one instruction made of one target, added up over a launch."""

    _fields_ = [
        ("kernel", c_char_p),
        ("target", c_char_p),
        ("file", c_char_p),
        ("line", c_int32),
        ("shared", c_int32),
        ("pc", c_uint64),
        ("op", c_int32),
        ("width", c_int32),
        ("requests", c_uint64),
        ("bytes", c_uint64),
        ("cost", c_uint64),
        ("ideal", c_uint64),
        ("worst", c_uint32),
        ("worst_ideal", c_uint32),
        ("warp", c_uint32),
        ("launch", c_uint32),
        ("block", c_uint64),
        ("address", c_int64 * 32),
    ]


class FoundRow(ctypes.Structure):
    """Something wrong between two instructions, or at one, that did not stop the kernel."""

    _fields_ = [
        ("kind", c_char_p),
        ("text", c_char_p),
        ("pc", c_uint64),
        ("other_pc", c_uint64),
        ("count", c_uint64),
        ("block", c_uint64),
        ("launch", c_int32),
        ("apart", c_int32),
    ]


class TraceCount(ctypes.Structure):
    """How many warps have executed an instruction."""

    _fields_ = [("name", c_char_p), ("count", c_uint64)]


def open_runtime(path: str) -> ctypes.CDLL:
    """Loads the runtime and declares its functions."""
    library = ctypes.CDLL(path)
    library.emu_begin.argtypes = [ctypes.POINTER(Region), c_int, c_int, c_int, c_uint64, c_int, c_int]
    library.emu_begin.restype = None
    library.emu_end.restype = None
    library.emu_stop.restype = None
    library.emu_call.argtypes = [ctypes.c_void_p] * 3
    library.emu_progress.argtypes = [ctypes.POINTER(c_uint64), ctypes.POINTER(c_uint64), ctypes.c_char_p, c_int]
    library.emu_finding.argtypes = [ctypes.POINTER(Fault)]
    library.emu_counters.argtypes = [ctypes.POINTER(Counter)]
    library.emu_counters.restype = None
    library.emu_trace_rows.argtypes = [ctypes.POINTER(ctypes.POINTER(TraceRow))]
    library.emu_found.argtypes = [ctypes.POINTER(ctypes.POINTER(FoundRow))]
    library.emu_instructions.argtypes = [ctypes.POINTER(ctypes.POINTER(TraceCount))]
    for name in ("emu_output", "emu_hint"):
        getattr(library, name).restype = c_char_p
    for name in ("emu_error_text", "emu_error_name"):
        getattr(library, name).argtypes = [c_int]
        getattr(library, name).restype = c_char_p
    return library
