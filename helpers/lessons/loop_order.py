"""The kernel of notebook 04 that shows what the order of the two loops is worth by itself."""

from __future__ import annotations

from pathlib import Path

from ..run.kernel import Kernel, load

SOURCE = Path(__file__).with_suffix(".cu")
KEYS, QUERIES = "for (int j0 = 0; j0 < a.Nk; j0 += Bc)", "for (int i0 = 0; i0 < a.Nq; i0 += Br)"


def naive(outside: str = "keys") -> Kernel:
    """A naive fp32 FlashAttention for d = 64, with the loop over "keys" or over "queries" outside: two lines exchanged, no other.

    ValueError for any other `outside`.
    """
    if outside not in ("keys", "queries"):
        raise ValueError(f'outside is "keys" or "queries", not {outside!r}')
    source = SOURCE.read_text()
    if outside == "queries":
        source = source.replace(KEYS, "<keys>").replace(QUERIES, KEYS).replace("<keys>", QUERIES)
    return load(source=source, quiet=True)
