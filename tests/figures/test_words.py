"""Numbers and lines of code in words."""

import pytest

from helpers.emulator.trace import Access, Request
from helpers.figures.words import DECIMAL, count, cut, many, share, size, statement, words


@pytest.mark.parametrize(
    ("n", "binary", "decimal"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1000, "1000 B", "1 kB"),
        (1536, "1.5 KiB", "1.54 kB"),
        (64 << 20, "64 MiB", "67.1 MB"),
        (3 << 30, "3 GiB", "3.22 GB"),
        (1000 << 10, "1000 KiB", "1.02 MB"),
        ((1 << 20) - 1, "1024 KiB", "1.05 MB"),
        (999_700, "976 KiB", "1000 kB"),
        (2 << 40, "2 TiB", "2199 GB"),
    ],
)
def test_bytes_in_either_units(n, binary, decimal):
    assert size(n) == binary and size(n, DECIMAL) == decimal
    assert size(n, gap="\n") == binary.replace(" ", "\n")


def test_digits_are_a_format():
    assert size(1536 * 1024 + 1, digits="g") == "1.5 MiB" and size(1300 * 1024, digits=".2f") == "1.27 MiB"


def test_counts_and_shares_fit_beside_a_line():
    numbers = {9999: "9999", 65536: "65.5k", 999_700: "1000k", 1234567: "1.23M", 5 * 10**9: "5G"}
    assert [count(n) for n in numbers] == list(numbers.values())
    assert [share(x) for x in (0.0, 0.004, 0.4, 1.0)] == ["<1%", "<1%", "40%", "100%"]
    assert [many(n, "sector") for n in (0, 1, 2000)] == ["0 sectors", "1 sector", "2,000 sectors"]


def test_a_cut_text_is_as_long_as_asked():
    assert cut("12345", 5) == "12345" and cut("123456", 5) == "1234…"


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("  for (int i = f(0); i < n; ++i) x[i] = y[i]; // all", "for (…) x[i] = y[i]; // all"),
        ("for (int i = 0; i < n; ++i) {", "for (int i = 0; i < n; ++i) {"),
        ("for (int i = 0;", "for (int i = 0;"),
        ("if (i < n) x = y;", "if (i < n) x = y;"),
    ],
)
def test_a_table_shows_a_loop_s_body(code, shown):
    assert statement(code) == shown


def access(op, space, addresses, width, cost, ideal, requests=1, bytes_=128):
    request = Request("k", 0, 0, (*addresses, *[None] * (32 - len(addresses))), width, cost, ideal)
    counts = (requests, bytes_, requests * cost, requests * ideal, cost)
    return Access("k", "k.cu", 7, op, space, "s" if space == "shared" else "O", width, *counts, request)


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (access("load", "shared", [0], 4, 1, 1), "from s: 1 request, 1 wavefront, as few as can be"),
        (
            access("load", "global", [30], 4, 2, 1),
            "1 request, 2 sectors where 1 would do; the worst takes 2 instead of 1: 1 lane asks for 4 bytes in 1 line of 128",
        ),
        (access("load", "global", [0, 128], 4, 3, 2), "3 instead of 2: 2 lanes ask for 8 bytes in 2 lines of 128"),
        (access("atomic", "shared", [0] * 32, 4, 32, 1), "32 instead of 1: lanes 0–31 take turns at bank 0"),
        (
            access("atomic", "shared", [0, 128], 4, 2, 1),
            "atomic of 4 bytes per lane on s: 1 request, 2 wavefronts where 1 would do; "
            "the worst takes 2 instead of 1: lanes 0, 1 take turns at bank 0",
        ),
        (
            access("cp.async", "shared", [4 * i for i in range(32)], 4, 4, 1),
            "4 instead of 1: lanes take turns whose sources lie in the same banks",
        ),
        (
            access("cp.async", "shared", [8 * i for i in range(32)], 4, 3, 1),
            "lanes 0, 16 want different words of bank 0; lanes take turns whose sources lie in the same banks",
        ),
        (
            access("cp.async.bulk.tensor", "global", [0], 2, 256, 256, requests=2, bytes_=16384),
            "cp.async.bulk.tensor, O: 2 requests of TMA, 16,384 bytes, 512 sectors, as few as can be",
        ),
        (
            access("cp.async.bulk", "shared", [0], 1, 0, 0, bytes_=512),
            "cp.async.bulk, s: 1 request of TMA, 512 bytes",
        ),
    ],
)
def test_an_access_is_a_sentence(shown, said):
    assert words(shown).endswith(said)
