"""A compiler's words about a kernel with what a reader of CUDA misses in them, and without the emulator's own insides."""

import re
from pathlib import Path

INCLUDE = Path(__file__).parent / "include"

# What CUDA has for kernels and `include` hasn't.
_NUMBER = "(u?(int|ll|short|char)|float|double|half|bfloat16)"
NEEDS_A_GPU = re.compile(
    rf"""__(f(add|sub|mul|div|maf(_ieee)?|rcp|sqrt)|d(add|sub|mul|div|rcp|sqrt)|fma)_r[nzud] | __{_NUMBER}2{_NUMBER}_r[nzud]
    | __v(abs(ss|diff[su])?|(add|sub)([su]s)?|avg[su]|haddu|neg(ss)?|sad[su]|(max|min)[su]|(cmp|set)(eq|ne|[gl][et][su]))[24]
    | __vi(addmax|addmin|max3?|min3?|bmax|bmin)_[su](32|16x2)(_relu)? | __dp2a_(lo|hi)
    | __h(eq|ne|le|ge|lt|gt)u?2?(_mask)? | __hb(eq|ne|le|ge|lt|gt)u2 | __hisnan2 | __hcmadd | h2?tanh_approx
    | (sin|cos|sincos)pif? | erf(inv|cinv|cx)f? | normcdf(inv)?f? | r?norm[34]df? | r?normf | r(cbrt|hypot)f? | cyl_bessel_i[01]f?
    | __is(Global|Local|Constant|GridConstant|((Cluster|Cta)?Shared)) | __cvta_\w+ | __fns | __brkpt | __prof_trigger | __pm[0-3]
    | __barrier_sync(_count)? | __cluster\w+ | __threadfence_cluster | __nv_(bswap(16|32|64)|atomic_\w+)
    | atomicCAS_(block|system) | tex([123]D|Cubemap)\w* | surf([123]D|Cubemap)\w+""",
    re.VERBOSE,
)
API = re.compile(r"cu(da)?[A-Z]\w*")
# What g++ and clang say of a name that is none.
UNKNOWN = re.compile(
    r"error: (?=.*(?:not (?:been )?declared|undeclared|not name a type|unknown type|must be available|neither visible))"
    r"[^‘'\n]*[‘'](?P<name>\w+)[’'][^;\n]*(?P<meant>; did you mean [‘'](?P<other>.*?)[’']\?)?"
)
INSIDE = re.compile(
    r"^(?:In file included from .*\n(?: +from .*\n)*)?\S*emulator/include/\S+: note: .*declared here(?:\n +\d* \|.*)*\n?",
    re.MULTILINE,
)
UNAVAILABLE = re.compile(r"(?<=error: )[‘'][^’'\n]*?(?: P = (?P<takes>\{.*?\})\])?[’'] is unavailable: (?P<why>.*)")


def explained(words: str) -> str:
    def without_guess(found: re.Match[str]) -> str:
        wrong = NEEDS_A_GPU.fullmatch(found["name"]) or (found["other"] or "").startswith("emu::")
        return found[0].removesuffix(found["meant"] or "") if wrong else found[0]

    words = UNKNOWN.sub(without_guess, INSIDE.sub("", words))
    words = UNAVAILABLE.sub(lambda found: ": ".join(filter(None, (found["why"], found["takes"]))), words)
    unknown = {found["name"]: None for found in UNKNOWN.finditer(words)}  # each once, in order
    lacking, api = (", ".join(filter(names.fullmatch, unknown)) for names in (NEEDS_A_GPU, API))
    if lacking:
        words = f"{words.rstrip()}\nCUDA has {lacking}; the emulator has not: that needs a GPU"
    if api:
        words = (
            f"{words.rstrip()}\n{api}: of CUDA's API the emulator has only a part; unless misspelt, that needs a GPU"
        )
    if re.search(r"fatal error: '?[^'\n]*'?(: No such file| file not found)", words):
        there = ", ".join(f"<{path.name}>" for path in sorted(INCLUDE.glob("*.h")))
        words = f"{words.rstrip()}\nof CUDA's own headers the emulator has {there}; what needs another one needs a GPU"
    return words
