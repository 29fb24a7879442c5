"""CUDA's own syntax rewritten as C++, token by token, with every line where it was.

The rest of CUDA C++ (types, intrinsics, qualifiers) is ordinary C++ and comes from the headers in ``include/``.
What the rewritten forms mean is said in ``include/emulator/launch.h``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

TOKEN = re.compile(
    r"""(?P<directive>(?:(?<=\n)|\A)[ \t]*\#(?:\\\n|[^\n])*)
      | (?P<space>[^\S\n]+|\n|\\\n)
      | (?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)
      | (?P<string>(?:u8|[uUL])?R"(?P<fence>[^(\s]*)\(.*?\)(?P=fence)"|(?:u8|[uUL])?"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      | (?P<name>[A-Za-z_]\w*)
      | (?P<number>\.?\d(?:[eEpP][+-]|'?[\w.])*)
      | (?P<punctuation><<<|::|->|<<|.)""",
    re.VERBOSE | re.DOTALL,
)
BRACKETS, CLOSING = ("(", "[", "{"), (")", "]", "}")
DEFINE = re.compile(r"([ \t]*#[ \t]*define[ \t]+(\w+))(.*)", re.DOTALL)
# Names that stand for something else, except after '.', '->' and '::'; the C library's also as std::name.
SIMPLE = {
    "__noinline__": "EMU_GUARDED __attribute__((noinline))",
    "printf": "::emu::print",
    "memcpy": "::emu::__tsan_memcpy",
    "memmove": "::emu::__tsan_memmove",
    "memset": "::emu::__tsan_memset",
}
UNSUPPORTED = {
    "__cluster_dims__": "the emulator has no clusters: __cluster_dims__ needs a GPU",
    "__managed__": "the emulator has no memory that host and kernels share: __managed__ needs a GPU",
}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"](fa/[^>"]+)[>"][^\n]*$', re.MULTILINE)
PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*$", re.MULTILINE)


class TranslationError(ValueError):
    """CUDA that the emulator can't rewrite; ``line`` counts from 1 in the text that was given."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass
class Token:
    kind: str
    text: str
    line: int
    out: str = ""  # what becomes of it

    def __post_init__(self) -> None:
        self.out = self.text


def tokens(text: str) -> list[Token]:
    """All tokens of ``text``, white space and comments included: joined, they give the text back."""
    out, line = [], 1
    for match in TOKEN.finditer(text):
        out.append(Token(match.lastgroup if match.lastgroup != "fence" else "string", match.group(), line))
        line += match.group().count("\n")
    return out


class Translation:
    """One pass over the tokens of a file; the pieces it can't leave alone are replaced in place."""

    def __init__(self, text: str, macro: str = "") -> None:
        self.macro = macro  # whose replacement the text is: it may stand in a function
        self.tokens = tokens(text)
        self.code = [i for i, t in enumerate(self.tokens) if t.kind not in ("space", "comment", "directive")]
        self.declared = 0
        self.needs: dict[str, float] = {}  # see note_kernel

    def text(self, k: int) -> str:
        return self.tokens[self.code[k]].text if 0 <= k < len(self.code) else ""

    def put(self, k: int, text: str) -> None:
        self.tokens[self.code[k]].out = text

    def error(self, k: int, message: str) -> TranslationError:
        return TranslationError(message, self.tokens[self.code[k]].line)

    def source(self, begin: int, end: int) -> str:
        """The code from token ``begin`` up to ``end`` on one line."""
        return " ".join(self.text(k) for k in range(begin, end))

    def joined(self, words: list[int]) -> str:
        """These code tokens on one line, apart where they were apart: `>=` is two of them."""
        out = ""
        for before, j in zip([None, *words], words):
            touching = before is not None and self.code[j] == self.code[before] + 1
            out += self.text(j) if touching or not out else f" {self.text(j)}"
        return out

    def blank(self, begin: int, end: int) -> None:
        """Removes code tokens, and keeps the line breaks between them."""
        for k in range(begin, end):
            self.put(k, "")

    def closing(self, k: int) -> int:
        """The bracket that closes the one at ``k``."""
        depth = 0
        for j in range(k, len(self.code)):
            depth += (self.text(j) in BRACKETS) - (self.text(j) in CLOSING)
            if depth == 0:
                return j
        raise self.error(k, f"'{self.text(k)}' is never closed")

    def closing_angle(self, k: int) -> int:
        """The '>' that closes the template argument list opened at ``k``."""
        depth, j = 0, k
        while j < len(self.code):
            text = self.text(j)
            if text in BRACKETS:
                j = self.closing(j)
            elif text == "<":
                depth += 1
            elif text == ">":
                depth -= 1
                if depth == 0:
                    return j
            j += 1
        raise self.error(k, "'<' is never closed")

    def run(self) -> str:
        for token in self.tokens:
            if token.kind == "directive" and (macro := DEFINE.match(token.text)):
                try:
                    token.out = macro[1] + Translation(macro[3], macro[2]).run()
                except TranslationError as error:
                    raise TranslationError(str(error), token.line + error.line - 1) from None
        k = 0
        while k < len(self.code):
            text = self.text(k)
            if text == "<<<":
                self.launch(k)
            elif text == "__shared__":
                k = self.shared(k)
            elif text in ("asm", "__asm__", "__asm"):
                k = self.inline_ptx(k)
            elif text in SIMPLE:
                self.rename(k)
            elif text in UNSUPPORTED:
                raise self.error(k, UNSUPPORTED[text])
            elif text == "__global__":
                self.note_kernel(k)
            elif text == "__launch_bounds__":
                self.launch_bounds(k)
            elif text in ("blockDim", "gridDim"):
                self.dimensions(k)
            elif text == "__grid_constant__":
                self.grid_constant(k)
            elif text.endswith("_smem"):
                self.named_array(k)
            elif text == "mbarrier_init":
                self.named_mbarrier(k)
            k += 1
        return "".join(t.out for t in self.tokens)

    def rename(self, k: int) -> None:
        before = self.text(k - 1)
        if before == "::" and self.text(k - 2) == "std":
            self.blank(k - 2, k)
        elif before in (".", "->", "::"):
            return
        self.put(k, SIMPLE[self.text(k)])

    # ---- kernel<<<grid, block, bytes, stream>>>(arguments)

    def note_kernel(self, k: int) -> None:
        """Remembers how many template arguments a launch has to name; with fewer, it deduces the others. A function of which
        arguments have defaults is never known by its name alone."""
        begin = k
        while self.text(begin - 1) not in ("", ";", "}", "{"):
            begin -= 1
        needed = 0.0
        if self.text(begin) == "template":
            try:
                parts = [{*map(self.text, range(*part))} for part in self.parts_in_angles(begin + 1)]
                needed = max((n for n, part in enumerate(parts, 1) if not part & {"=", "."}), default=1)
            except TranslationError:  # a '<' may compare
                needed = math.inf
        while not (self.text(k + 1) == "(" and self.text(k) not in ("__launch_bounds__", "__maxnreg__", "alignas")):
            k = self.closing(k) + 1 if self.text(k) in BRACKETS else k + 1
            if k >= len(self.code):
                return
        if any(
            self.text(j) == "=" and self.text(j - 1) not in ("=", "<", ">", "!") for j in range(k, self.closing(k + 1))
        ):
            needed = math.inf
        self.needs[self.text(k)] = max(self.needs.get(self.text(k), 0), needed)

    def launch_bounds(self, k: int) -> None:
        """The body of the kernel begins with them, where C++ knows its template's arguments."""
        last = self.closing(k + 1)
        body = last + 1
        while self.text(body) not in ("{", ";", ""):
            body = (self.closing(body) if self.text(body) in BRACKETS else body) + 1
        if self.text(body) == "{":
            self.put(body, f"{{ ::emu::launch_bounds{self.verbatim(k + 1, last + 1)};")

    def dimensions(self, k: int) -> None:
        """``dim3 blockDim(32);`` of a launcher: CUDA's own is a macro here, so this one gets another name where it is seen."""
        if self.text(k - 1 - (self.text(k - 1) == "&")) != "dim3" and self.text(k + 1) not in ("(", "{", "="):
            return
        name, depth, end = self.text(k), 0, k
        while end < len(self.code) and depth >= 0:
            if self.text(end) == name and self.text(end - 1) not in (".", "->", "::"):
                self.put(end, f"emu_{name}")
            end += 1
            depth += (self.text(end) in BRACKETS) - (self.text(end) in CLOSING)
            if depth < 0 and self.text(end) == ")" and self.text(end + 1) == "{":  # it is a parameter
                depth, end = 0, end + 1

    def launch(self, k: int) -> None:
        begin = self.callee(k)
        name = re.sub(r" ?(::|[<>()\[\].]) ?", r"\1", self.source(begin, k)).replace(" ,", ",").replace('"', "'")
        end = k + 1
        while not (self.text(end) == ">" and self.text(end + 1) == ">" and self.text(end + 2) == ">"):
            if end >= len(self.code) or self.text(end) in (";", *CLOSING):
                raise self.error(k, "this launch has '<<<' and no '>>>'")
            end = self.closing(end) if self.text(end) in BRACKETS else end
            end += 1
        while self.text(end + 3) == ">":  # '>' of a template argument list directly before '>>>'
            end += 1
        if self.text(end + 3) != "(":
            raise self.error(end, "'>>>' must be followed by the kernel's arguments")
        angle = self.opening(k - 1, "<", ">") if self.text(k - 1) == ">" else k
        given = len(self.parts_in_angles(angle)) if angle < k else 0
        called = given < self.needs.get(self.text(angle - 1), 0)
        self.put(begin, f'::emu::prepare("{name}", {"[=](const auto &...emu_p) { " * called}{self.text(begin)}')
        self.put(k, f"{'(emu_p...); }' * called}, ::emu::Shape(")
        self.put(end, "))")
        self.blank(end + 1, end + 3)

    def grid_constant(self, k: int) -> None:
        """``const __grid_constant__ Maps maps``, of which the grid has one and no thread a copy, is taken by reference."""
        end = k + 1
        while self.text(end) not in (",", ")"):
            if end >= len(self.code):
                raise self.error(k, "'__grid_constant__' must stand in the declaration of a kernel's parameter")
            opens = self.text(end) in BRACKETS
            end = (self.closing(end) if opens else self.closing_angle(end) if self.text(end) == "<" else end) + 1
        begin, last = k, end - 1
        while self.text(begin - 1) == "const":
            begin -= 1
        before_a_type = ("::", "const", "typename", *["__grid_constant__"] * (self.text(begin - 1) in ("(", ",")))
        named = last > k and self.tokens[self.code[last]].kind == "name" and self.text(last - 1) not in before_a_type
        at = last if named else end
        self.blank(k, k + 1)
        self.put(at, f"&{self.text(at)}")

    def callee(self, k: int) -> int:
        """Where the expression that names the kernel begins: `ns::kernel<64, D>` before '<<<'."""
        j, want = k - 1, True  # want: an operand must come next, going backwards
        while j >= 0:
            text = self.text(j)
            if want and text == ">":
                j = self.opening(j, "<", ">")
            elif want and text in (")", "]"):
                j = self.opening(j, "(" if text == ")" else "[", text)
                if text == ")" and self.tokens[self.code[j - 1]].kind != "name":
                    return j
            elif want and self.tokens[self.code[j]].kind == "name":
                if self.text(j - 1) not in ("::", ".", "->"):
                    return j
                want = False
            elif not want:
                if text == "::" and self.tokens[self.code[j - 1]].kind != "name" and self.text(j - 1) != ">":
                    return j
                want = True
            else:
                break
            j -= 1
        raise self.error(k, "'<<<' must follow the name of a kernel")

    def opening(self, k: int, left: str, right: str) -> int:
        depth = 0
        for j in range(k, -1, -1):
            if left == "<" and self.text(j) == ")":
                depth += 1000  # comparisons in parentheses are no template brackets
            elif left == "<" and self.text(j) == "(":
                depth -= 1000
            elif depth < 1000:
                depth += (self.text(j) == right) - (self.text(j) == left)
            if depth == 0:
                return j
        raise self.error(k, f"'{right}' is never opened")

    # ---- [extern] __shared__ declarations

    def shared(self, k: int) -> int:
        begin = k
        while self.text(begin - 1) not in ("", ";", "{", "}", ")", ":") or self.aligned_before(begin):
            begin = self.aligned_before(begin) or begin - 1
        end = k
        while self.text(end) != ";":
            if end >= len(self.code) and self.macro:  # the ';' stands behind its name
                break
            if end >= len(self.code):
                raise self.error(k, "this __shared__ declaration has no ';'")
            end = self.closing(end) if self.text(end) in BRACKETS else end
            end += 1
        if not self.in_function(begin):
            raise self.error(k, "the emulator takes __shared__ declarations inside functions only")
        words = [j for j in range(begin, end) if self.text(j) not in ("__shared__", "static")]
        if not words:
            raise self.error(k, "the emulator takes __shared__ only with the variable that it declares")
        if "extern" in (self.text(j) for j in words):
            self.dynamic_array(begin, end, [j for j in words if self.text(j) != "extern"])
        else:
            self.static_variables(begin, end, words)
        return end

    def named_array(self, k: int) -> None:
        """``T *K_smem = place;`` in a kernel (or ``uint32_t K_smem``) tells the emulator which array begins there. Where
        that might not be the declaration of a variable, the array stays without its name."""
        if self.text(k + 1) != "=" or self.text(k + 2) in ("=", "{") or not (self.declares(k) and self.in_kernel(k)):
            return
        end = k + 2
        while self.text(end) not in (",", ";"):
            if end >= len(self.code) or self.text(end) in CLOSING:
                return
            if self.text(end) == "<":
                try:
                    last = self.closing_angle(end)
                except TranslationError:
                    return
                if not (self.text(end - 1).endswith("_cast") or self.text(last + 1) == "::"):  # it may compare
                    return
                end = last
            elif self.text(end) in BRACKETS:
                end = self.closing(end)
            end += 1
        self.put(k + 1, f'= ::emu::named("{self.text(k)}",')
        self.put(end, f"){self.text(end)}")

    def named_mbarrier(self, k: int) -> None:
        """``mbarrier_init(K_full + 8 * s, 1)`` tells the emulator what the source calls the mbarrier: by the first term of
        its address that is a name, and not that of shared memory. Where there is none, it stays without one."""
        if self.text(k + 1) != "(" or self.tokens[self.code[k - 1]].kind == "name":
            return
        terms, end = [[]], k + 2
        while self.text(end) != ",":
            text = self.text(end)
            if end >= len(self.code) or text in ("<", *CLOSING):  # "<" may open a template's arguments, or compare
                return
            if text == "+":
                terms.append([])
            else:
                terms[-1].append(text)
            end = (self.closing(end) if text in BRACKETS else end) + 1
        plain = [term[-1] for term in terms if term and all(re.fullmatch(r"[A-Za-z_]\w*|::", word) for word in term)]
        name = next((name for name in plain if not name.endswith("smem")), None)
        if name is not None:
            self.put(k + 2, f'::emu::named_mbarrier("{name}", {self.text(k + 2)}')
            self.put(end, "),")

    def declares(self, k: int) -> bool:
        """Does the statement around the name at ``k`` begin with a type, and is that name one of what it declares?"""
        begin = k
        while self.text(begin - 1) not in ("", ";", "{", "}"):
            begin -= 1
        j, words = begin, 0
        while self.tokens[self.code[j]].kind == "name" or self.text(j) in ("::", "<"):
            words += self.text(j) not in ("const", "::", "<", "__restrict__")
            j = self.closing_angle(j) + 1 if self.text(j) == "<" else j + 1
        pointer = self.text(j) == "*"
        known = self.text(begin) not in ("return", "case", "delete", "throw", "goto", "using", "typedef", "else", "do")
        return known and self.text(k - 1) not in (".", "->", "::") and (words >= 2 or (pointer and words == 1))

    def in_kernel(self, k: int) -> bool:
        """Is one of the braces around ``k`` the body of a ``__global__`` function?"""
        depth = 0
        for j in range(k - 1, -1, -1):
            depth += (self.text(j) == "}") - (self.text(j) == "{")
            if depth < 0:
                depth, i = 0, j - 1
                while self.text(i) not in ("", ";", "{", "}"):
                    if self.text(i) == "__global__":
                        return True
                    i -= 1
        return False

    def aligned_before(self, k: int) -> int | None:
        """Where `alignas(...)` or the like begins, if one ends just before ``k``."""
        if self.text(k - 1) != ")":
            return None
        j = self.opening(k - 1, "(", ")")
        return j - 1 if self.text(j - 1) in ("alignas", "__align__", "__attribute__") else None

    def in_function(self, k: int) -> bool:
        """Is there a brace around ``k`` that belongs to neither a namespace, nor a class, nor extern "C"?"""
        depth = 0
        for j in range(k - 1, -1, -1):
            if self.text(j) == "}":
                depth += 1
            elif self.text(j) == "{":
                if depth > 0:
                    depth -= 1
                    continue
                head = []
                for i in range(j - 1, -1, -1):
                    if self.text(i) in (";", "{", "}"):
                        break
                    head.append(self.text(i))
                linkage = head[-1:] == ["extern"] and len(head) == 2
                if not linkage and (")" in head or not set(head) & {"namespace", "struct", "class", "union"}):
                    return True
        return self.macro != ""

    def static_variables(self, begin: int, end: int, words: list[int]) -> None:
        """Each variable becomes the one member of a struct, which C++ lets us declare with the reader's own words."""
        commas, name, star, i = [], None, None, 0
        while i < len(words):
            text = self.text(words[i])
            if text == ",":
                commas.append(i)
            elif text == "=":
                raise self.error(words[i], "__shared__ variables can't be initialised")
            elif text in BRACKETS or (text == "<" and not commas):
                if text == "[" and self.text(words[i] + 1) != "[" and name is None and not commas:
                    name = i - 1  # of the first variable: what stands before it, but for '*', is the type of all
                stop = self.closing(words[i]) if text in BRACKETS else self.closing_angle(words[i])
                while i + 1 < len(words) and words[i] != stop:
                    i += 1
            elif text == "*" and star is None and not commas:
                star = i
            i += 1
        name = (commas or [len(words)])[0] - 1 if name is None else name
        name = name if star is None else min(name, star)
        specifiers = self.joined(words[:name])
        out = []
        for first, last in zip([name, *(c + 1 for c in commas)], [*commas, len(words)], strict=True):
            declarator = self.joined(words[first:last])
            names = (self.text(j) for j in words[first:last] if self.text(j) not in ("*", "const", "volatile"))
            variable = next(names, "")
            self.declared += 1
            holder = f"emu_shared_{self.macro}{self.declared}"
            out.append(
                f"struct {holder} {{ {specifiers} {declarator}; }};"
                f' auto& {variable} = ::emu::shared<{holder}, decltype({holder}::{variable})>("{variable}").{variable}'
            )
        self.blank(begin, end)
        self.put(begin, "; ".join(out))

    def dynamic_array(self, begin: int, end: int, words: list[int]) -> None:
        first = next((i for i, j in enumerate(words) if self.text(j) == "["), None)
        if first is None or self.text(words[first] + 1) != "]":
            raise self.error(begin, "an extern __shared__ variable must be an array of unknown length: name[]")
        name = self.text(words[first - 1])
        bounds = self.source(words[first], end)
        element, i = [], 0
        while i < first - 1:  # its alignment doesn't matter: the arena is aligned to 1024
            if self.text(words[i]) in ("alignas", "__align__", "__attribute__"):
                stop = self.closing(words[i + 1])
                while words[i] != stop:
                    i += 1
            else:
                element.append(self.text(words[i]))
            i += 1
        of = " ".join(element)
        self.blank(begin, end)
        self.put(begin, f'{of} (&{name}) {bounds} = ::emu::dynamic_array<{of} {bounds}>("{name}")')

    # ---- asm [volatile] ("text" : outputs : inputs : clobbers)

    def inline_ptx(self, k: int) -> int:
        """Becomes a call of the interpreter, which gets the operands by value and gives back the outputs; those of wgmma,
        whose results come later, by address."""
        j = k + 1
        while self.text(j) in ("volatile", "__volatile__"):
            j += 1
        if self.text(j) != "(":
            raise self.error(k, "'asm' must be followed by '('")
        end = self.closing(j)
        if any(t.kind == "directive" for t in self.tokens[self.code[k] : self.code[end]]):
            raise self.error(k, "the emulator takes no preprocessor directive inside an asm statement")
        sections = self.sections(j + 1, end)
        text = self.verbatim(*sections[0])
        if not text:
            raise self.error(k, "an asm statement needs its text")
        outputs, inputs = (
            [self.operand(*part) for part in self.parts(*s)] for s in (sections[1:3] + [(end, end)] * 2)[:2]
        )
        for number, (constraint, _) in enumerate(outputs + inputs):
            want = r"[=+]&?[hrlfd]" if number < len(outputs) else r"[hrlfdn]"
            if not re.fullmatch(want, constraint):
                what = f"an {'output' if number < len(outputs) else 'input'} operand's constraint"
                raise self.error(k, f"'{constraint}' is no {what} that the emulator knows")
        self.blank(k, end + 1)
        if not text.replace('"', "").strip() and not inputs and all(c[0] == "+" for c, _ in outputs):
            self.put(k, "do {} while (0)")  # for the compiler only, which may keep those registers where it likes
            return end
        late = "wgmma.mma_async" in text  # which writes its outputs when it is waited for
        kinds = "".join(f"@{c[-1]}" if late and c[0] in "=+" else c.replace("&", "") for c, _ in outputs + inputs)
        out = [f'do {{ static ::emu::Ptx emu_ptx = {{{text}, "{kinds}", __FILE__, __LINE__, nullptr}};']
        values = []
        for n, (constraint, expression) in enumerate(outputs):
            out.append(f"auto& emu_{n} = {expression};")
            if late:
                values.append(f"::emu::place<'{constraint[-1]}'>(emu_{n})")
            elif constraint[0] == "+":
                values.append(f"::emu::input<'{constraint[-1]}'>(emu_{n})")
        values += [f"::emu::input<'{constraint}'>({expression})" for constraint, expression in inputs]
        returned = [] if late else outputs
        out.append(
            f"const auto emu_out = ::emu::interpret<::emu::room({len(returned)})>({', '.join(['&emu_ptx', *values])});"
        )
        for n, (constraint, _) in enumerate(returned):
            out.append(f"::emu::output<'{constraint[-1]}'>(emu_{n}, emu_out.bits[{n}]);")
        if not returned:
            out.append("(void)emu_out;")
        self.put(k, " ".join([*out, "} while (0)"]))
        return end

    def sections(self, begin: int, end: int) -> list[tuple[int, int]]:
        """What the colons of an asm statement part: the token ranges of text, outputs, inputs, clobbers."""
        found, first, k = [], begin, begin
        while k < end:
            text = self.text(k)
            if text in BRACKETS:
                k = self.closing(k)
            elif text in (":", "::"):
                found.append((first, k))
                if text == "::":
                    found.append((k, k))
                first = k + 1
            k += 1
        return [*found, (first, end)]

    def parts(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The token ranges between the commas."""
        found, first, k = [], begin, begin
        while k < end:
            if self.text(k) in BRACKETS:
                k = self.closing(k)
            elif self.text(k) == ",":
                found.append((first, k))
                first = k + 1
            k += 1
        return [*found, (first, end)] if end > begin else []

    def parts_in_angles(self, k: int) -> list[tuple[int, int]]:
        """The token ranges between the commas of the template's list that opens at ``k``."""
        found, first, j, end = [], k + 1, k + 1, self.closing_angle(k)
        while j < end:
            if self.text(j) in BRACKETS:
                j = self.closing(j)
            elif self.text(j) == "<":
                j = self.closing_angle(j)
            elif self.text(j) == ",":
                found.append((first, j))
                first = j + 1
            j += 1
        return [*found, (first, end)] if end > k + 1 else []

    def verbatim(self, begin: int, end: int) -> str:
        """The code from token ``begin`` up to ``end`` as it was written, on one line and without comments."""
        if begin >= end:
            return ""
        between = self.tokens[self.code[begin] : self.code[end - 1] + 1]
        return "".join(" " if t.kind in ("space", "comment") else t.text for t in between)

    def operand(self, begin: int, end: int) -> tuple[str, str]:
        """The constraint and the expression of an operand: ``"=r"(x)``."""
        if self.tokens[self.code[begin]].kind != "string" or self.text(begin + 1) != "(":
            raise self.error(begin, 'an asm operand must be a constraint and an expression: "r"(x)')
        return self.text(begin)[1:-1], self.verbatim(begin + 1, end)


def translate(text: str) -> str:
    """``text`` with CUDA's syntax rewritten; as many lines, each where it was. Raises TranslationError."""
    return Translation(text).run()


def unit(text: str, path: str, include: Path) -> str:
    """The whole translation unit of a rung: ``text`` (from ``path``) with the ``fa/`` headers it includes written in
    place, each translated, and ``#line`` directives that keep the reader's own file names and lines.

    Raises TranslationError, whose message begins with file and line.
    """
    seen: set[str] = set()

    def expand(text: str, path: str) -> str:
        try:
            text = translate(text)
        except TranslationError as error:
            raise TranslationError(f"{path}:{error.line}: {error}", error.line) from None

        def header(match: re.Match[str]) -> str:
            name, file = match.group(1), include / match.group(1)
            if name in seen or not file.is_file():
                return "" if name in seen else match.group()
            seen.add(name)
            line = match.string.count("\n", 0, match.start()) + 1
            return f"{expand(file.read_text(), str(file))}\n#line {line + 1} {quoted(path)}".rstrip()

        # Headers are written out once, at their first #include: a `#pragma once` has nothing left to do.
        return f"#line 1 {quoted(path)}\n" + INCLUDE.sub(header, PRAGMA_ONCE.sub("", text))

    return expand(text, path)


def quoted(path: str) -> str:
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'
