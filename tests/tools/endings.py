"""A launcher whose host code ends the process in many ways, run on one back end. As a program, since what is tested could end
it: `python endings.py nvcc|emulator` writes a line of JSON for each launch, and what the launcher prints between them."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading

import pytest
import torch
from emulated import build
from hopper import pretend

from helpers.emulator import Launcher
from helpers.ladder.contract import Call, FaArgs
from helpers.ladder.errors import KernelError
from helpers.toolchain import nvcc

EXIT = "exit in the launcher: fa_launch calls "
WHAT = "exception in the launcher: fa_launch throws "
CALL = "terminate in the launcher: fa_launch calls std::terminate()"
# name: (what the launcher does, what is said of it; "" if nothing is wrong)
WAYS = {
    "exit": ("exit(1);", EXIT + "exit(1)"),
    "exit without failure": ("std::exit(EXIT_SUCCESS);", EXIT + "exit(0)"),
    "_exit": ("_exit(2);", EXIT + "_exit(2)"),
    "_Exit": ("std::_Exit(3);", EXIT + "_Exit(3)"),
    "quick_exit": ("std::quick_exit(4);", EXIT + "quick_exit(4)"),
    "exit by a pointer": ("void (*volatile f)(int) = exit; f(5);", EXIT + "exit(5)"),
    "abort": ("std::abort();", "abort in the launcher: fa_launch calls abort()"),
    "assert": ("assert(way < 0);", "assertion in the launcher: fa_launch fails the assertion `way < 0`"),
    "throw": ('throw std::runtime_error("no such tile");', WHAT + "std::runtime_error: no such tile"),
    "throw a number": ("throw 3;", WHAT + "an exception of type int"),
    "throw in the library": ("std::vector<int>(3).at(way);", WHAT + "std::out_of_range: vector"),
    "throw in noexcept": ('[]() noexcept { throw std::logic_error("odd"); }();', WHAT + "std::logic_error: odd"),
    "terminate": ("std::terminate();", CALL),
    "terminate in the library": ("std::thread([] {});", CALL),
    "exit in a handler": ("try { throw 3; } catch (int e) { exit(e); }", EXIT + "exit(3)"),
    "exit while unwinding": ("struct D { ~D() { exit(6); } } d; throw 3;", EXIT + "exit(6)"),
    "exit in a static's initialiser": ("static int x = (way > 0 ? exit(7) : void(), 7); return cudaError_t(x);", EXIT + "exit(7)"),
    "exit after a static's initialiser": ("static int n = 0; static int x = ++n; return n == 1 && x == 1 ? (exit(9), cudaSuccess) : cudaErrorUnknown;", EXIT + "exit(9)"),
    "exit after an initialiser that threw": ("static int n = 0; for (int i = 0; i < 2; ++i) try { [[maybe_unused]] static int x = n++ == 0 ? throw 3 : way; } catch (int) {} return n == 2 ? (exit(10), cudaSuccess) : cudaErrorUnknown;", EXIT + "exit(10)"),
    "exit of a child": ("if (fork() == 0) _exit(8); int how; wait(&how); return WEXITSTATUS(how) == 8 ? cudaSuccess : cudaErrorUnknown;", ""),
    "a static initialised": ("static int x = way; return x > 0 ? cudaSuccess : cudaErrorUnknown;", ""),
    "an exception caught": ("try { throw 3; } catch (int) {} return cudaSuccess;", ""),
}  # fmt: skip
NOT_HERE = ("throw in the library", "terminate in the library")  # other lines are named for these, or none
# In a kernel, where nvcc refuses them.
IN_A_KERNEL = {
    "exit in a kernel": ("exit(1);", "thread 0 of block 0 calls exit(1), which only host code can"),
    "abort in a kernel": ("abort();", "thread 0 of block 0 calls abort(), which only host code can"),
    "throw in a kernel": ('throw std::runtime_error("r");', "thread 0 of block 0 throws std::runtime_error: r, which only host code can"),
}  # fmt: skip


def cases(ways: dict[str, tuple[str, str]]) -> str:
    return "".join(
        f"    case {i}: {{ {way} break; }}  // {name}\n" for i, (name, (way, _)) in enumerate(ways.items(), 1)
    )


HEADERS = "cassert cstdio cstdlib exception iostream stdexcept sys/wait.h thread unistd.h vector".split()
# Way 0 is a launch with nothing wrong, which finds no exception left by the one before. Negative ways are a kernel's.
SOURCE = f"""#include <fa/args.cuh>
{"".join(f"#include <{name}>{chr(10)}" for name in HEADERS)}
__global__ void kernel(int way) {{
#ifndef __NVCC__
  switch (way) {{
{cases(IN_A_KERNEL)}
  }}
#endif
}}
static cudaError_t go(int way) {{
  switch (way) {{
    case 0: return std::current_exception() || std::uncaught_exceptions() ? cudaErrorUnknown : cudaSuccess;
{cases(WAYS)}
  }}
  kernel<<<1, 1>>>(-way);
  return cudaGetLastError();
}}
extern "C" cudaError_t fa_launch(const fa_args* args, cudaStream_t) {{
  if (args->Nq > 0) {{
    printf("printed %d", args->Nq);
    std::cout << " streamed";
    fprintf(stderr, "reason %d", args->Nq);
  }}
  return go(args->Nq);
}}
"""


def line_of(name: str) -> int:
    """The line of SOURCE that has the way of this name."""
    return 1 + [line.endswith(f"// {name}") for line in SOURCE.splitlines()].index(True)


def launcher(back_end: str) -> Launcher | nvcc.Launcher:
    """What SOURCE is built to; on "nvcc" without a GPU."""
    if back_end == "emulator":
        return build(SOURCE)
    pretend(pytest.MonkeyPatch())
    nvcc.cuda_error = "CUDA error {}".format
    return build(SOURCE, "cuda")


def write(**record: object) -> None:
    os.write(1, f"\n{json.dumps(record)}\n".encode())


def main(back_end: str) -> None:
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc.puts, b"handlers of the process ran", None)
    built = launcher(back_end)

    def call(way: int) -> Call:
        return Call(FaArgs(B=1, H=1, Nq=way, Nk=1, D=1, scale=1.0), {"Q": torch.zeros(1)}, {"O": torch.zeros(1)})

    def said(way: int) -> str:
        """The text of the KernelError that a launch raises; "" if it returns."""
        try:
            built.launch(call(way))
        except KernelError as error:
            return str(error)
        return ""

    for way, name in enumerate(WAYS, 1):
        write(name=name, first=said(way), again=said(way), next=said(0))
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(said(1)))
    thread.start()
    thread.join()
    write(name="in a thread", first=texts[0])
    if back_end == "emulator":
        for way, name in enumerate(IN_A_KERNEL, 1):
            write(name=name, first=said(-way), next=said(0))
        (finding,) = built.trace(call(1)).findings
        write(name="traced", kind=finding.kind, line=finding.line)
    write(name="done")


if __name__ == "__main__":
    main(sys.argv[1])
