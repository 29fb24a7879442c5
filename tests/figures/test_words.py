"""Numbers and lines of code in words."""

import pytest

from helpers.figures.words import DECIMAL, count, cut, many, share, size, statement


@pytest.mark.parametrize(
    ("n", "binary", "decimal"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1000, "1000 B", "1 kB"),
        (1536, "1.5 KiB", "1.54 kB"),
        (64 << 20, "64 MiB", "67.1 MB"),
        (3 << 30, "3 GiB", "3.22 GB"),
        (2 << 40, "2 TiB", "2.2e+03 GB"),
    ],
)
def test_bytes_in_either_units(n, binary, decimal):
    assert size(n) == binary and size(n, DECIMAL) == decimal
    assert size(n, gap="\n") == binary.replace(" ", "\n")


def test_digits_are_a_format():
    assert size(1536 * 1024 + 1, digits="g") == "1.5 MiB" and size(1300 * 1024, digits=".2f") == "1.27 MiB"


def test_counts_and_shares_fit_beside_a_line():
    assert [count(n) for n in (9999, 65536, 1234567, 5 * 10**9)] == ["9999", "65.5k", "1.23M", "5G"]
    assert [share(x) for x in (0.0, 0.004, 0.4, 1.0)] == ["<1%", "<1%", "40%", "100%"]
    assert [many(n, "sector") for n in (0, 1, 2)] == ["0 sectors", "1 sector", "2 sectors"]


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
