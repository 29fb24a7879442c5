"""Kernels with one memory error each: what compute-sanitizer and the X-ray are held against.

Most are made by rule (every barrier removed, every bounds check widened, …), the rest are written out below. Each has an
id that stays the same while its rung does: "04.barrier-removed.2" is the second place in 04 where that rule applies.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from ..ladder.rung import code, includes, rung, rungs

# (Nq, Nk, D), or (rows, N) of a softmax: tails in every dimension, several tiles of queries and of keys, two heads (where
# a rung knows groups, on one head of K and V; where it knows masks, causal); for 02 one warp per row, a block per row, and a
# row in slices; for 21 two pieces of a few queries' keys.
SHAPES = {
    "01": [(37, 50, 24)],
    "02": [(6, 101), (3, 1023), (2, 33001)],
    "21": [(5, 700, 64)],
    "default": [(130, 150, 64)],
}
BATCH, HEADS = 1, 2


@dataclass(frozen=True)
class Mutant:
    """`source` is rung `stem` with one memory error, `bug`, first seen in `line`; only the instance for D is left in it."""

    id: str
    stem: str
    bug: str
    line: int
    source: str = field(repr=False)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes it is run at."""
        return SHAPES.get(self.stem[:2], SHAPES["default"])

    @property
    def options(self) -> dict[str, int | bool]:
        """What a call asks for beside its inputs."""
        asked = {"causal": True, "splits": 2}
        return {name: value for name, value in asked.items() if name in rung(self.stem).features}

    @property
    def heads(self) -> tuple[int, int]:
        """Heads of Q, and of K and V."""
        return HEADS, 1 if "gqa" in rung(self.stem).features else HEADS

    @property
    def digest(self) -> str:
        """12 digits of the SHA-256 of the code, without comments, and of the headers it includes."""
        texts = [self.source, *(header.read_text() for header in includes(self.source))]
        return hashlib.sha256("".join(map(code, texts)).encode()).hexdigest()[:12]


_BOUND = r"(?P<bound>a\.N[qk]|a\.D|rows_left|rows|slice\.last|N)\b(?!\s*\()"
_NARROW = {"<": "<=", ">=": ">", ">": ">=", "<=": "<"}

# rule -> (what is wrong, pattern, replacement). Patterns are searched in the code before the launcher, comments blanked;
# a replacement keeps to its line, so lines keep their numbers.
RULES = {
    "barrier-removed": ("a barrier less", r"__syncthreads\(\);", ";"),
    "barrier-of-a-warp": ("a barrier of each warp alone", r"__syncthreads\(\);", "__syncwarp();"),
    "barrier-in-a-branch": ("only the first warp waits", r"__syncthreads\(\);", "if (threadIdx.x < 32) __syncthreads();"),
    "barrier-without-a-lane": ("one lane doesn't wait", r"__syncthreads\(\);", "if (threadIdx.x != 33) __syncthreads();"),
    "lane-returns": ("a lane leaves before a barrier", r"__syncthreads\(\);", "if (threadIdx.x == 33) return; __syncthreads();"),
    "warp-returns": ("a warp leaves before a barrier", r"__syncthreads\(\);", "if (threadIdx.x / 32 == 1) return; __syncthreads();"),
    "syncwarp-removed": ("a __syncwarp less", r"__syncwarp\(\);", ";"),
    "syncwarp-of-half": ("half of the lanes in the mask", r"__syncwarp\(\);", "__syncwarp(0x0000ffffu);"),
    "syncwarp-in-a-branch": ("half of the lanes wait for all", r"__syncwarp\(\);", "if (threadIdx.x % 32 < 16) __syncwarp();"),
    "shuffle-of-half": ("half of the lanes in a shuffle's mask", r"__shfl_xor_sync\(0xffffffff(?=, (?:m|x|s\.m|m_new),)", "__shfl_xor_sync(0x0000ffffu"),
    "wait-removed": ("a wait for copies less", r"fa::cp_async_wait<[^;]*>\(\);", ";"),
    "wait-loosened": ("waits for one group fewer", r"fa::cp_async_wait<(?P<n>[^;]*)>\(\);", r"fa::cp_async_wait<\g<n> + 1>();"),
    "commit-removed": ("copies join the next group", r"fa::cp_async_commit\(\);", ";"),
    "mbarrier-wait-removed": ("a wait on an mbarrier less", r"fa::mbarrier_wait\([^;]*\);", ";"),
    "named-barrier-removed": ("a named barrier less", r"fa::bar_sync\([^;]*\);", ";"),
    "proxy-fence-removed": ("stores not fenced for the async proxy", r"fa::fence_proxy_async\(\);", ";"),
    "wgmma-wait-removed": ("a wait for products less", r"fa::wgmma_wait_group<[^;]*>\(\);", ";"),
    "bound-off-by-one": ("one too many", rf"(?P<op><=|>=|<|>) {_BOUND}", lambda m: f"{_NARROW[m['op']]} {m['bound']}"),
    "bound-too-wide": ("64 too many", rf"(?P<op><=|>=|<|>) {_BOUND}", lambda m: f"{m['op']} {m['bound']} + 64"),
    "row-stride": ("rows one element further apart", r"a\.(?P<x>[QKVO])_stride\[2\]", r"(a.\g<x>_stride[2] + 1)"),
    "head-stride": ("heads one element further apart", r"a\.(?P<x>[QKVO])_stride\[1\]", r"(a.\g<x>_stride[1] + 1)"),
    "thread-index": ("the thread's index off by one", r"threadIdx\.x", "(threadIdx.x + 1)"),
    "arrays-overlap": ("two shared arrays in one place", r"(?P<a>\w+_smem) = (?P<b>\w+_smem) \+ [^;,]+(?P<end>[;,])", r"\g<a> = \g<b>\g<end>"),
    "one-buffer": ("one buffer for two stages", r"\b(?P<s>\w+) % 2 \* Ks", "0 * Ks"),
}  # fmt: skip
# The launcher asks for less than the kernel uses.
LAUNCH_RULES = {
    "shared-memory": ("64 bytes of shared memory too few", r"smem_bytes, stream>>>", "smem_bytes - 64, stream>>>"),
    "grid": ("one block too many", r"(?<=<<<)(?P<type>unsigned|dim3)\((?P<blocks>ctas|heads|blocks|row_blocks)\)", r"\g<type>(\g<blocks> + 1)"),
}  # fmt: skip

# Where a rule would only repeat, in this rung, what it gives elsewhere. 11 differs from 10 in where a chunk lies, alone.
REPEATED = {
    "01": ("bound-too-wide",),
    "04": ("head-stride",),
    "10": ("head-stride",),
    "11": tuple({*RULES, *LAUNCH_RULES} - {"barrier-removed", "barrier-in-a-branch"}),
    "12": ("head-stride", "row-stride", "thread-index", "shuffle-of-half"),
}
# A helper function's `return` would not leave the kernel, nor would a lambda's, and where that gives a value it doesn't compile;
# 23 has no P in shared memory at D = 64.
NOT = {"02.lane-returns.1", "02.warp-returns.1", "22.lane-returns.2", "22.warp-returns.2", "23.arrays-overlap.4"}
# Comparisons that decide on a value, not on an access: which scores count, who writes LSE.
_VALUES = re.compile(r"columns past|is_key|\) S_reg|LSE\[")

# (rung, name, what is wrong, old, new): `old` occurs once in the rung.
WRITTEN = [
    ("01", "row-of-scores", "S with the wrong row length", "(int64_t(head) * a.Nq + i) * a.Nk + j]", "(int64_t(head) * a.Nq + i) * (a.Nk + 1) + j]"),
    ("01", "scores-unwritten", "the last key's score is never written", "S[(int64_t(head) * a.Nq + i) * a.Nk + j] = a.scale * s;", "if (j + 1 < a.Nk) S[(int64_t(head) * a.Nq + i) * a.Nk + j] = a.scale * s;"),
    ("01", "probabilities-unwritten", "P of the last keys is never written", "for (int j = threadIdx.x; j < a.Nk; j += 32) P[j] =", "for (int j = threadIdx.x; j < a.Nk - 3; j += 32) P[j] ="),
    ("01", "rows-per-block", "row numbers leave gaps", "int64_t(blockIdx.x) * rows_per_block + threadIdx.y", "int64_t(blockIdx.x) * (rows_per_block + 1) + threadIdx.y"),
    ("01", "lanes-leave", "some lanes leave before the shuffles", "if (row >= rows) return; // the whole warp", "if (row >= rows || threadIdx.x > 29) return; // the whole warp"),
    ("01", "before-the-start", "P one element before its row", "P[j] = expf(S[j] - m_finite) * l_inv;", "P[j - 1] = expf(S[j] - m_finite) * l_inv;"),
    ("01", "misaligned-pair", "two floats at an odd place", "s += q[c] * k[c];", "s += q[c] * (c + 1 < a.D ? reinterpret_cast<const float2 *>(k + c)->x : k[c]);"),
    ("01", "workspace-swapped", "softmax reads P's memory, which nobody has written", "const float *S = static_cast<const float *>(a.workspace[0]) + row * a.Nk;", "const float *S = static_cast<const float *>(a.workspace[1]) + row * a.Nk;"),
    ("02", "state-unwritten", "one warp's state is never written", "if (threadIdx.x % 32 == 0) warp_state_smem", "if (threadIdx.x % 32 == 0 && threadIdx.x > 0) warp_state_smem"),
    ("02", "state-array-short", "a state too few in shared memory", "warp_state_smem[warps];", "warp_state_smem[warps - 1];"),
    ("02", "every-lane-writes", "all lanes of a warp write its state", "if (threadIdx.x % 32 == 0) warp_state_smem", "warp_state_smem"),
    ("02", "alignment-unchecked", "vectors from any address", "if (e >= slice.first && e + 4 <= slice.last && aligned16(S)) {", "if (true) {"),
    ("02", "alignment-lost", "vectors counted from an odd place", "const int64_t vector0 = begin / 4;\n", "const int64_t vector0 = begin / 4 + 1;\n"),
    ("02", "slice-begins-early", "a slice that starts 4 elements early", "return N / 4 * s / slices * 4;", "return N / 4 * s / slices * 4 - 4 * (s > 0);"),
    ("02", "state-in-the-wrong-place", "the slices' states are looked for one element further", "state = merge(state, {p[0], p[1]});", "state = merge(state, {p[1], p[2]});"),
    ("02", "too-many-slices", "a state of a slice that isn't there", "for (int s = threadIdx.x; s < slices; s += 32) {\n    const", "for (int s = threadIdx.x; s <= slices; s += 32) {\n    const"),
    ("03", "pitch", "rows of shared memory at odd places", "ld = d + 4,", "ld = d + 3,"),
    ("03", "pitch-of-P", "rows of P_smem at odd places", "ld_p = Bc + 4;", "ld_p = Bc + 3;"),
    ("03", "state-uninitialised", "m and l start unwritten", "m[i] = -FA_INFINITY, l[i] = 0.f;", ";"),
    ("03", "output-uninitialised", "O starts unwritten", "    fa::store4(O + e / (d / 4) * a.O_stride[2] + e % (d / 4) * 4, zero);", "    (void)zero;"),
    ("03", "zero-fill-removed", "rows past the last key are left unwritten", "    if (r0 + r < N) fa::load4(x, X + (r0 + r) * stride + c);\n    fa::store4(X_smem + r * T::ld + c, x);", "    if (r0 + r < N) fa::load4(x, X + (r0 + r) * stride + c);\n    if (r0 + r < N) fa::store4(X_smem + r * T::ld + c, x);"),
    ("03", "tile-load-short", "a quarter of a tile is not loaded", "e < n * d / 4; e += T::threads", "e < n * d / 4 - T::threads; e += T::threads"),
    ("03", "tile-load-long", "a tile and a row is loaded", "e < n * d / 4; e += T::threads", "e < (n + 1) * d / 4; e += T::threads"),
    ("03", "P-unwritten", "P_smem is never written", "P_smem[(row0 + r) * T::ld_p + tx + c * T::TX] = p;", ";"),
    ("03", "P-transposed", "P_smem by columns", "P_smem[(row0 + r) * T::ld_p + tx + c * T::TX] = p;", "P_smem[(tx + c * T::TX) * T::ld_p + row0 + r] = p;"),
    ("03", "key-index", "K_smem read one row further", "K_smem + (tx + c * T::TX) * T::ld + k", "K_smem + (tx + c * T::TX + 1) * T::ld + k"),
    ("03", "query-index", "Q_smem read one row further", "Q_smem + (row0 + r) * T::ld + k", "Q_smem + (row0 + r + 1) * T::ld + k"),
    ("03", "rows-shared", "two warps' rows overlap", "const int row0 = ty * T::rows;", "const int row0 = ty * T::rows / 2;"),
    ("03", "all-write-state", "every thread of a row writes m and l", "if (tx == 0) m[i] = m_new, l[i] = l_new;", "m[i] = m_new, l[i] = l_new;"),
    ("04", "pitch-of-Q", "rows of Q_smem at odd places", "ld_q = Br + 4,", "ld_q = Br + 2,"),
    ("04", "pitch-of-K", "rows of K_smem at odd places", "ld_k = d + 4;", "ld_k = d + 2;"),
    ("04", "Q-unwritten", "a column of Q_smem is left out", "for (int e = 0; e < 4; ++e) Q_smem[", "for (int e = 0; e < 3; ++e) Q_smem["),
    ("04", "Q-load-long", "a row more than Q_smem has", "n < Br * d / 4; n += T::threads", "n < (Br + 2) * d / 4; n += T::threads"),
    ("04", "Q-load-short", "the last rows of Q_smem are left out", "n < Br * d / 4; n += T::threads", "n < Br * d / 4 - T::threads; n += T::threads"),
    ("04", "first-V-unwritten", "the first slab of V isn't committed", "  commit_V(0);\n", "\n"),
    ("04", "first-K-unwritten", "the first slab of K isn't committed", "  commit_K(0);\n", "\n"),
    ("04", "P-columns-shared", "warps write each other's columns of P", "fa::store4(P_smem + (col0 + c % 4) * ld_q + row0, P_reg);", "fa::store4(P_smem + (col0 + c % 4) * ld_q + row0 % T::warp_rows, P_reg);"),
    ("04", "P-half-unwritten", "half of P is never written", "          fa::store4(P_smem + (col0 + c % 4) * ld_q + row0 + T::warp_rows / 2, P_reg + 4);", ""),
    ("04", "K-next-wrong", "the next tile's K from the wrong column", "Bc * a.K_stride[2] - (d - Ks)", "Bc * a.K_stride[2] - d"),
    ("04", "K-left-not-counted", "keys left are not counted down", "K_left -= is_last ? Bc : 0;", ";"),
    ("04", "V-left-not-counted", "keys left are not counted down", "V_left -= Ks;", ";"),
    ("04", "slab-past-the-end", "V's next slab from one slab further", "V_next += Ks * a.V_stride[2];", "V_next += 2 * Ks * a.V_stride[2];"),
    ("04", "commit-too-far", "slab s + 2 overwrites the slab being read", "commit_K(s + 1);", "commit_K(s + 2);"),
    ("10", "row-of-A", "ldmatrix one row further", "row_A = lane % 16,", "row_A = lane % 16 + 1,"),
    ("10", "chunk-of-A", "ldmatrix one chunk further", "chunk_A = lane / 16;", "chunk_A = lane / 16 + 1;"),
    ("10", "row-of-B", "ldmatrix a matrix further", "row_B = lane % 8 + lane / 16 * 8,", "row_B = lane % 8 + lane / 8 * 8,"),
    ("10", "chunk-of-B", "ldmatrix past the row", "chunk_B = lane / 8 % 2;", "chunk_B = lane / 8;"),
    ("10", "misaligned-rows", "ldmatrix rows of half a chunk", "return row * d + chunk * 8; }", "return row * d + chunk * 4; }"),
    ("10", "pitch", "rows of shared memory one element further apart", "return row * d + chunk * 8; }", "return row * (d + 1) + chunk * 8; }"),
    ("10", "zero-fill-removed", "rows past the last key are left unwritten", "    *reinterpret_cast<uint4 *>(X_smem + at<d>(row + r, chunk)) = x;", "    if (row + r < rows_left) *reinterpret_cast<uint4 *>(X_smem + at<d>(row + r, chunk)) = x;"),
    ("10", "tile-load-short", "half of a tile is not loaded", "for (int r = 0; r < rows; r += step)", "for (int r = 0; r < rows / 2; r += step)"),
    ("10", "tile-load-long", "more rows than a tile has", "for (int r = 0; r < rows; r += step)", "for (int r = 0; r < rows + step; r += step)"),
    ("10", "store-misaligned", "two elements at an odd place", "+ i * a.O_stride[2] + 2 * t;", "+ i * a.O_stride[2] + 2 * t + 1;"),
    ("11", "swizzle-of-writes-only", "written swizzled, read row-major", "at<d>(16 * n + row_B, 2 * k + chunk_B)", "(16 * n + row_B) * d + (2 * k + chunk_B) * 8"),
    ("11", "swizzle-too-wide", "XOR with more bits than a row has chunks", "% (d < 64 ? d / 8 : 8)) * 8;", "% 32) * 8;"),
    ("11", "row-of-B", "ldmatrix a matrix further", "row_B = lane % 8 + lane / 16 * 8,", "row_B = lane % 8 + lane / 8 * 8,"),
    ("12", "zero-fill-removed", "rows past the last key are read", "row + r < rows_left ? 16 : 0);", "16);"),
    ("12", "copies-skipped", "rows past the last key are left unwritten", "    fa::cp_async_16(X_smem + at<d>(row + r, chunk), X + r * stride, row + r < rows_left ? 16 : 0);", "    if (row + r < rows_left) fa::cp_async_16(X_smem + at<d>(row + r, chunk), X + r * stride);"),
    ("12", "misaligned-copy", "cp.async to half a chunk", "fa::cp_async_16(X_smem + at<d>(row + r, chunk),", "fa::cp_async_16(X_smem + at<d>(row + r, chunk) + 4,"),
    ("12", "stage-in-use", "copies go to the stage being read", "fetch(j0 + (stages - 1) * Bc, (stage + stages - 1) % stages);", "fetch(j0 + (stages - 1) * Bc, stage);"),
    ("12", "stage-not-turned", "the stage never changes", "stage = (stage + 1) % stages)", "stage = stage)"),
    ("12", "fetch-before-the-barrier", "the next copies leave before the barrier", "    fa::cp_async_wait<stages - 2>();", "    fetch(j0 + (stages - 1) * Bc, (stage + stages - 1) % stages);\n    fa::cp_async_wait<stages - 2>();"),
    ("12", "fetch-past-the-end", "tiles past the last key are fetched", "    if (j0 < a.Nk) {\n      load_tile<Bc, d>(K_smem", "    if (true) {\n      load_tile<Bc, d>(K_smem"),
]  # fmt: skip


@cache
def mutants() -> dict[str, Mutant]:
    """All mutants by id, rung by rung. ValueError if one that is written out no longer fits its rung."""
    found = {}
    for each in rungs():
        for mutant in [*_by_rule(each.stem), *_written(each.stem)]:
            found[mutant.id] = mutant
    return found


def original(stem: str) -> Mutant:
    """The rung itself, cut down and run like its mutants: id "04.original"."""
    return Mutant(f"{stem[:2]}.original", stem, "none", 0, _one_instance(rung(stem).source, stem))


def _by_rule(stem: str) -> Iterator[Mutant]:
    source = _one_instance(rung(stem).source, stem)
    bare = re.sub(r"//[^\n]*", lambda found: " " * len(found[0]), source)
    lines, launcher = source.splitlines(), source.index("[region: launcher]")
    for rules, begin, end in ((RULES, 0, launcher), (LAUNCH_RULES, launcher, len(bare))):
        for name, (bug, pattern, new) in rules.items():
            if name in REPEATED.get(stem[:2], ()):
                continue
            for n, place in enumerate(re.compile(pattern).finditer(bare, begin, end), 1):
                text = new(place) if callable(new) else place.expand(new)
                made = source[: place.start()] + text + source[place.end() :]
                id, line = f"{stem[:2]}.{name}.{n}", 1 + source.count("\n", 0, place.start())
                if id not in NOT and not _VALUES.search(lines[line - 1]):
                    yield Mutant(id, stem, bug, line, made)


def _written(stem: str) -> Iterator[Mutant]:
    source = _one_instance(rung(stem).source, stem)
    for number, name, bug, old, new in WRITTEN:
        if stem[:2] != number:
            continue
        if source.count(old) != 1:
            raise ValueError(f"mutant {number}.{name}: {old!r} occurs {source.count(old)} times in {stem}, not once")
        made = source.replace(old, new)
        line = next(n for n, (a, b) in enumerate(zip(source.splitlines(), made.splitlines()), 1) if a != b)
        yield Mutant(f"{number}.{name}", stem, bug, line, made)


def _one_instance(source: str, stem: str) -> str:
    """`source` without the instances for head dimensions that no mutant is run at: they would only be compiled."""
    kept = {shape[-1] for shape in SHAPES.get(stem[:2], SHAPES["default"])}
    cut = lambda m: m[0] if int(m["d"]) in kept else "\n"  # noqa: E731
    return re.sub(r"  case (?P<d>\d+):\n    return launch<\d+>\(a, stream\);", cut, source)
