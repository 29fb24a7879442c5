"""One way of saying what takes long: a line that is replaced in place and gone at the end, in a notebook and in a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

EVERY = 0.5  # seconds between two lines


@contextlib.contextmanager
def telling(words: str | Callable[[], str], after: float = 1.0) -> Iterator[None]:
    """While the body runs longer than `after` seconds, shows `words` and the seconds gone by, and takes it back at the end.

    words: the text, or what gives it anew each time. In a notebook the line is a display of its own, which leaves nothing
    behind; in a terminal it is on stderr. Elsewhere, and in a thread in the background, for which nobody waits, nothing is shown.
    """
    line = _line() if threading.current_thread() is threading.main_thread() else None
    if line is None:
        yield
        return
    start, over = time.monotonic(), threading.Event()
    shown = []

    def tell() -> None:
        wait = after
        while not over.wait(wait):
            text = words if isinstance(words, str) else words()
            line(f"{text}, {time.monotonic() - start:.0f} s")
            shown.append(True)
            wait = EVERY

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if shown:
            line("")


def _line() -> Callable[[str], None] | None:
    """What shows a text in place of the one before; empty takes it back. None where nobody would see it."""
    publisher = _publisher()
    if publisher is None:
        return _in_terminal if sys.stderr.isatty() else None
    name, begun = uuid.uuid4().hex, []

    def show(text: str) -> None:
        # A display without data has no height; one with an empty text would leave an empty line.
        data = {"text/plain": f"{text} …"} if text else {}
        publisher.publish(data, {}, transient={"display_id": name}, update=bool(begun))
        begun.append(True)

    return show


def _publisher() -> Any:
    """The notebook's, if this Python is a notebook's kernel."""
    if "ipykernel" not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell.display_pub if hasattr(shell, "kernel") else None


def _in_terminal(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"\r\x1b[K{text}{' …' if text else ''}")
        sys.stderr.flush()
