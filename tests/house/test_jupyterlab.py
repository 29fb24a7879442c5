"""JupyterLab as `make lab` starts it, in the environment that `make test` leaves behind: notebooks open, and its defaults apply."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from helpers import show

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
EXTENSION, LOAD = ROOT / ".jupyterlab" / "extension", "static/remoteEntry.js"
STEMS = ("02_online_softmax", "04_fa2_fp32")
STARTS_WITHIN = 300  # seconds: takes 5 to 25; only a server that hangs needs it


class Server:
    """`make lab` in a copy of the checkout, with this Python's environment and without a browser."""

    def __init__(self, root: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        config = {
            "ServerApp": {"open_browser": False, "port": self.port, "port_retries": 0},
            "IdentityProvider": {"token": "t"},
            "LabApp": {"app_settings_dir": str(root / ".venv/share/jupyter/lab/settings")},
        }
        (root / "config").mkdir()
        (root / "config" / "jupyter_lab_config.json").write_text(json.dumps(config))
        (root / ".venv").mkdir()
        (root / ".venv" / "installed").touch()
        make = ["make", "--old-file=.venv/installed", "lab", f"BIN={Path(sys.executable).parent}"]
        own = {"JUPYTER_CONFIG_DIR": f"{root}/config", "JUPYTER_RUNTIME_DIR": f"{root}/run"}
        own["JUPYTER_PATH"] = f"{root}/.venv/share/jupyter"
        self.root, self.log = root, root / "server.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                make, cwd=root, env=os.environ | own, stdout=log, stderr=log, start_new_session=True
            )

    def ask(self, path: str, content: dict | None = None) -> dict:
        """GET, or PUT of `content`; AssertionError with the server's words if it refuses."""
        return json.loads(self.text(path, content))

    def text(self, path: str, content: dict | None = None) -> str:
        """The same, whatever the answer is."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", headers={"Authorization": "token t"})
        if content is not None:
            request.method, request.data = "PUT", json.dumps(content).encode()
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{request.get_method()} {path}: {error.read().decode()}") from error

    def wait(self) -> None:
        until = time.monotonic() + STARTS_WITHIN
        while True:
            try:
                self.ask("api/status")
                return
            except (urllib.error.URLError, ConnectionError):
                assert self.process.poll() is None and time.monotonic() < until, self.log.read_text()
                time.sleep(0.2)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkout")
    for path in ("pyproject.toml", "Makefile"):
        shutil.copy(ROOT / path, root)
    shutil.copytree(ROOT / ".jupyterlab", root / ".jupyterlab")
    (root / "some.egg-info").mkdir()
    for stem in STEMS:
        for path in (f"notebooks/{stem}.ipynb", f"notebooks/src/{stem}.py"):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, root / path)
    server = Server(root)
    try:
        server.wait()
        yield server
    finally:
        os.killpg(server.process.pid, signal.SIGTERM)
        server.process.wait(30)


@pytest.mark.parametrize("stem", STEMS)
def test_a_saved_notebook_opens_again(server, stem):
    """The browser's requests when a notebook is opened, saved, changed by another program and opened again."""
    path = f"api/contents/notebooks/{stem}.ipynb"
    opened = server.ask(path)["content"]
    server.ask(path, {"type": "notebook", "format": "json", "content": opened})
    later = time.time() + 60
    os.utime(server.root / "notebooks" / f"{stem}.ipynb", (later, later))
    assert server.ask(path)["content"]["cells"] == opened["cells"]


@pytest.mark.parametrize(
    "plugin, key, value",
    [
        ("apputils-extension:notification", "fetchNews", "false"),
        ("docmanager-extension:plugin", "defaultViewers", {"markdown": "Markdown Preview"}),
        ("notebook-extension:tracker", "codeCellConfig", {"lineNumbers": True}),
    ],
)
def test_the_defaults_of_make_lab_apply(server, plugin, key, value):
    default = server.ask(f"lab/api/settings/@jupyterlab/{plugin}")["schema"]["properties"][key]["default"]
    assert default == value if isinstance(value, str) else default.items() >= value.items()


def test_the_file_browser_shows_what_readers_open(server):
    def listed(folder):
        return {item["name"] for item in server.ask(f"api/contents/{folder}")["content"]}

    assert (server.root / "some.egg-info").exists() and "some.egg-info" not in listed("")
    assert {"notebooks", "Makefile"} <= listed("")
    assert listed("notebooks") == {f"{stem}.ipynb" for stem in STEMS}


def test_the_extension_is_found_and_served(server):
    page = server.text("lab")
    assert '"name": "flashattention-notebooks"' in page.replace('":"', '": "')
    served = server.text(f"lab/extensions/flashattention-notebooks/{LOAD}")
    assert served == (EXTENSION / LOAD).read_text() and "http" not in served, "it makes no request"


def test_pip_installs_the_whole_extension():
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    theirs = {file for into, named in files.items() for file in named if "labextensions" in into}
    assert theirs == {str(path.relative_to(ROOT)) for path in EXTENSION.rglob("*") if path.is_file()}


def test_colours_of_code_have_contrast():
    """4.5:1 on the ground of JupyterLab's code cells and of its page, light and dark."""
    style = (EXTENSION / LOAD).read_text().partition("STYLE = `")[2].partition("`;")[0]
    rules = re.findall(r"([^{}]+)\{([^{}]+)\}", style)
    found = 0
    for selector, body in rules:
        grounds = ("#212121", "#f5f5f5") if "cm-" in selector or "mirror" in body else ("#111111", "#ffffff")
        ground = grounds['light="false"' not in selector]
        for colour in re.findall(r"color: (#[0-9a-f]{6})", body):
            found += 1
            assert contrast(colour, ground) >= 4.5, (selector, colour, contrast(colour, ground))
    assert found > 10
    for colour in {*show.COLOURS.values(), re.search("#[0-9a-f]{6}", show.ASIDE)[0]}:
        assert style.count(f'[style^="color:{colour}"]') == 2, "for a light page and a dark one"


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
