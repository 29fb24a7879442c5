"""What a graded kernel may say and call, so that it can't forge the counts that are taken in its own process.

Outputs are compared in another process; wavefronts, bytes and findings are counted by the emulator beside the kernel. A thread of
a kernel can write nothing but the tensors and its shared memory, since each of its loads and stores is checked. What could go
around that is refused: in the text, words that switch the checks off or name the emulator; in the library, calls of anything but
mathematics and the emulator's own.

That leaves fa_launch, which isn't a kernel. The emulator lets host code touch no tensor. But where a task is a whole rung, its launcher
can copy the tensors by cudaMemcpy, compute the result on the copies, and copy it back. `judge` notices that where no kernel reads or
writes a tensor as the rung's do, but not where a kernel touches them all and the host then copies its own result over what it wrote.
Host code could also find the emulator's counts by arithmetic on addresses. Neither can be done by accident: read the launcher of a whole
rung before its points count.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

from ...ladder.paths import HELPERS
from ..regions import Typed, code

_WORDS = {
    r"\bemu\b|\bemu_\w*": "the emulator's own names",
    r"\b__(?:builtin|tsan|asan|sanitizer|ubsan|wrap|real|stack_chk|cyg)\w*": "the compiler's own functions",
    r"\b__attribute\w*|\b__declspec\b|\[\s*\[(?!\s*maybe_unused\s*\]\s*\])|\balignas\s*\[|\b(?:__)?(?:typeof|thread_local)\b": "attributes",
    r"\b(?:__)?gnu(?:__)?\b|\b(?:_C|c)lang\b": "attributes",  # whose brackets may come from macros
    r"\b_mm\d*_\w+|\bv(?:ld|st)[1-4]\w*": "the host's own loads and stores",  # of x86-64 and Arm, which nobody announces
    r"\b_Pragma\b|^[ \t]*#[ \t]*pragma(?![ \t]+(?:unroll|once)\b)[^\n]*": "pragmas other than unroll",
    r"##": "pasted tokens",
    r"\bprintf\b": "printed lines",  # its %n writes wherever it is told to
    r"^[ \t]*#[ \t]*define\b[^\n]*\b(?:__)?asm\w*|^[ \t]*#[ \t]*define\b[^\n]*(?:\bextern\b|#)": "such macros",
    r"\bextern\b(?!\s+__shared__)(?!\s*\"C\"\s*(?:\{|(?:__host__\s*)?cudaError_t\s+fa_launch\b))": "extern for anything but shared memory and fa_launch",
    r"\bextern\s*\"C\"\s*\{": 'blocks of extern "C", which belongs before fa_launch itself,',
}
_MATHS = """acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh erf erfc exp exp10 exp2 expm1 fabs fdim floor fma fmax
fmin fmod frexp hypot ilogb ldexp lgamma llrint llround log log10 log1p log2 logb lrint lround modf nan nearbyint nextafter pow
remainder remquo rint round scalbln scalbn sin sincos sinh sqrt tan tanh tgamma trunc isnan isinf isfinite signbit""".split()
_LANGUAGE = re.compile(
    r"__tsan_\w+|__sanitizer_cov_trace_pc|__ubsan_handle_\w+|__gmon_start__|_ITM_\w+|__cxa_\w+|__gxx_personality_v0|_Unwind_Resume"
    r"|__dso_handle|__wrap_\w+|_GLOBAL_OFFSET_TABLE_|__stack_chk_fail|__stack_chk_guard"
    r"|_Zn[wa]m|_Zd[la]Pvm?|_ZSt\d+__throw_\w+|_ZTVN10__cxxabi\w+|_ZTI\w+|malloc|free|calloc|abs|labs|llabs"
    r"|__popcount[sd]i2|__u?(?:div|mod|divmod)ti[34]"
)
_OWN = re.compile(r"__tsan|__sanitizer|__ubsan|__asan|__wrap|__real|emu_")
_REFUSED = {"print"}  # printf in a kernel, however it was spelt


def unfit(typed: Typed) -> str:
    """The first thing in a submitted text that isn't graded: its place and a clause; empty if there is none."""
    bare = code(typed.text, kept='"C"')
    joined = bare.replace("\\\n", "  ")  # a macro of several lines
    found = [
        (m.start(), m[0], said) for pattern, said in _WORDS.items() for m in re.finditer(pattern, joined, re.MULTILINE)
    ]
    if not found:
        return ""
    at, words, said = min(found)
    line = typed.line + bare.count("\n", 0, at)
    return f"{typed.name}:{line}: `{' '.join(words.split())}` can't be graded: {said} have no place in a submission"


def strange(library: Path) -> str:
    """What a compiled kernel calls or defines that none may, in a clause; empty if nothing. Runs nm (binutils)."""
    lines = subprocess.run(["nm", str(library)], capture_output=True, text=True, check=True).stdout.splitlines()
    for line in lines:
        *_, kind, name = line.split()
        name = name.partition("@")[0]
        if kind in "Uw" and not _may_call(name):
            return f"it uses `{_plain(name)}`: a graded kernel calls nothing but mathematics and CUDA"
        if kind not in "Uw" and _OWN.match(name):
            return f"it defines `{name}`, which is the compiler's"
    return ""


def _may_call(name: str) -> bool:
    if of_emulator := re.match(r"_ZN3emu(\d+)", name):
        word = name[of_emulator.end() :][: int(of_emulator[1])]
        return word in _declared() and word not in _REFUSED
    return bool(_LANGUAGE.fullmatch(name)) or name.removesuffix("f") in _MATHS or name in _MATHS


@cache
def _declared() -> frozenset[str]:
    """Names that the headers for kernels mention: of what the runtime exports, kernels need no more."""
    headers = (HELPERS / "emulator" / "include").rglob("*.h")
    return frozenset(word for path in headers for word in re.findall(r"\w+", path.read_text()))


def _plain(name: str) -> str:
    """emu::print of _ZN3emu5printEPKcz; other names as they are."""
    found = re.match(r"_ZN3emu(\d+)", name)
    word = name[found.end() :][: int(found[1])] if found else name
    return "printf" if word == "print" else word
