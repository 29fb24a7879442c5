"""Host code in a kernel: nvcc refuses it, and to the host's compiler it is code like any other. What might be right passes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .translate import Translation, TranslationError

OF_C = set(
    "scanf fprintf puts putchar sprintf snprintf fflush fopen exit rand srand sleep usleep getenv qsort calloc realloc".split()
)
# Not those that are constexpr, as std::max is: load_inline has nvcc take them (--expt-relaxed-constexpr).
OF_STD = set(
    "vector string map set list deque function unique_ptr shared_ptr make_unique make_shared to_string cout cerr endl chrono thread "
    "mutex sort fill copy accumulate swap".split()
)
ON_DEVICE = {"__device__", "__global__", "constexpr", "consteval"}
ATTRIBUTES = {"__launch_bounds__", "__maxnreg__", "__align__", "alignas", "__attribute__", "decltype", "noexcept"}
BEFORE_A_CALL = {"return", "else", "do", "case", "and", "or", "not"}
CONDITION, DEFINED = re.compile(r"\s*#\s*(if|endif)"), re.compile(r"\s*#\s*define\s+(\w+)")


@dataclass
class Function:
    name: str
    words: set[str]  # what stands before its name
    begin: int  # of its parameters
    end: int


def refuse(text: str, path: str, headers: Sequence[Path]) -> None:
    """TranslationError where a ``__global__`` or ``__device__`` function of ``text`` (from ``path``) throws, or calls a function
    that only the host has. If the folders ``headers`` have one of its name too, that may be meant."""
    code = Translation(text)
    macros, unsure = _only_what_always_stands(code)
    try:
        functions = list(_functions(code))
    except TranslationError:
        return  # told by those who must understand it
    maybe = {f.name for f in functions if f.words & (ON_DEVICE | macros) or any(map(str.isupper, f.words))}
    on_host = ({f.name for f in functions} | OF_C) - maybe - macros - unsure
    for function in functions:
        if function.words & {"__device__", "__global__"} and "__host__" not in function.words:
            for k, what, fix in _host_code(code, function, on_host):
                if fix and any(re.search(rf"\b{what}\(", h.read_text()) for of in headers for h in of.rglob("*.*h")):
                    continue
                kind = "kernel" if "__global__" in function.words else "function"
                line = code.tokens[code.code[k]].line
                words = f"{path}:{line}: {what} is host code, which the {kind} {function.name} can't run{fix}"
                raise TranslationError(words, line)


def _only_what_always_stands(code: Translation) -> tuple[set[str], set[str]]:
    """Leaves out what is between an #if and its #endif. Gives the names of macros, and all names that are left out."""
    macros, names, kept, depth, of = set(), set(), [], 0, set(code.code)
    for i, token in enumerate(code.tokens):
        if token.kind == "directive":
            if found := CONDITION.match(token.text):
                depth += 1 if found[1] == "if" else -1
            elif found := DEFINED.match(token.text):
                macros.add(found[1])
        elif depth and token.kind == "name":
            names.add(token.text)
        elif not depth and i in of:
            kept.append(i)
    code.code = kept
    return macros, names


def _functions(code: Translation) -> Iterator[Function]:
    """Those outside of classes, with a body or without one."""
    k = begin = 0
    while k < len(code.code):
        text = code.text(k)
        if text in ("(", "["):
            k = code.closing(k)
        elif text in (";", "{", "}"):
            inside = text == "{" and ("namespace" in _texts(code, begin, k) or code.text(k - 2) == "extern")
            function = None if inside or text == "}" else _function(code, begin, k)
            end = code.closing(k) if text == "{" and not inside else k
            if function is not None:
                function.end = end
                yield function
            k = end
            if inside or text != "{" or function is not None:  # else a class or an initialiser, which goes on
                begin = k + 1
        k += 1


def _function(code: Translation, begin: int, end: int) -> Function | None:
    """The one that is declared there, up to its '{' or ';'."""
    k = begin
    while code.text(k) == "template" and code.text(k + 1) == "<":
        k = code.closing_angle(k + 1) + 1
    parameters = _texts(code, begin, k)
    begin = k
    while k < end and code.text(k) != "=":
        if code.text(k) == "(" and code.tokens[code.code[k - 1]].kind == "name" and code.text(k - 1) not in ATTRIBUTES:
            name = code.text(k - 1) if code.text(k - 2) != "::" else ""  # a class's
            return Function(name, _texts(code, begin, k - 1) - parameters, k, end)
        k = code.closing(k) + 1 if code.text(k) in ("(", "[", "{") else k + 1
    return None


def _texts(code: Translation, begin: int, end: int) -> set[str]:
    return {code.text(k) for k in range(begin, end)}


def _host_code(code: Translation, function: Function, on_host: set[str]) -> Iterator[tuple[int, str, str]]:
    """Where it is, what it is called, and how to fix it."""
    k = function.begin
    while k < function.end:
        text = code.text(k)
        if text in ("decltype", "sizeof", "noexcept") and code.text(k + 1) == "(":
            k = code.closing(k + 1)
        elif text in ("throw", "try"):
            yield k, f"'{text}'", ""
        elif text in OF_STD and code.text(k - 1) == "::" and code.text(k - 2) == "std":
            yield k, f"std::{text}", ""
        elif text in on_host and all(
            _may_be_call(code, j) for j in range(function.begin, function.end) if code.text(j) == text
        ):
            yield k, text, ": write __device__ before it" if text not in OF_C else ""
        k += 1


def _may_be_call(code: Translation, k: int) -> bool:
    """Not a declaration, nor of a class or a namespace."""
    before = code.text(k - 1)
    follows_name = code.tokens[code.code[k - 1]].kind == "name" and before not in BEFORE_A_CALL
    return code.text(k + 1) == "(" and not follows_name and before not in (".", "->", "::", ">")
