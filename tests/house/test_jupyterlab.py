"""JupyterLab as `make lab` starts it, in the environment that `make test` leaves behind: notebooks open, and its defaults apply."""

import json
import os
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

ROOT = Path(__file__).parents[2]
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
        self.root, self.log = root, root / "server.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                make, cwd=root, env=os.environ | own, stdout=log, stderr=log, start_new_session=True
            )

    def ask(self, path: str, content: dict | None = None) -> dict:
        """GET, or PUT of `content`; AssertionError with the server's words if it refuses."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", headers={"Authorization": "token t"})
        if content is not None:
            request.method, request.data = "PUT", json.dumps(content).encode()
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
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
    for path in ("pyproject.toml", "Makefile", ".jupyterlab.json"):
        shutil.copy(ROOT / path, root)
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
