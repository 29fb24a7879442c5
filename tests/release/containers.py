"""Before a release, as root: the steps of Dockerfile, .devcontainer/ and .binder/, executed in clean Debian systems.

    python tests/release/containers.py [--share FOLDER ...]

It reads the files themselves: each RUN, COPY, USER, WORKDIR, ARG, ENV and CMD of the Dockerfile is carried out in a chroot that
debootstrap makes, as its user. Then JupyterLab has to answer at port 8888, to its token only, and `helpers doctor` has to be
content; postCreateCommand has to work in the stage that .devcontainer names, and postBuild in an environment like Binder's.
--share: folders of this machine that are visible in there (wheels that pip is to find). Needs debootstrap, some 6 GB and a
quarter of an hour, so it is not in CI.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PORT = 8888
PASSED_ON = re.compile(r"(PIP|UV)_\w+|SSL_CERT_\w+|\w+_(proxy|PROXY)")  # how this machine reaches the package indexes
KNOWN = {"FROM", "RUN", "USER", "ARG", "ENV", "WORKDIR", "COPY", "EXPOSE", "CMD"}


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, lines that end in a backslash joined. ValueError for one that isn't KNOWN."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    found = [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]
    if unknown := {name for name, _ in found} - KNOWN:
        raise ValueError(f"Dockerfile: {', '.join(sorted(unknown))} is unknown here, add it to {Path(__file__).name}")
    return found


@dataclass(frozen=True)
class System:
    """A Debian system in a folder: who works in it, where, and with which variables."""

    root: Path
    shared: tuple[Path, ...] = ()
    user: str = "root"
    folder: str = "/"
    env: dict[str, str] = field(default_factory=dict)

    def command(self, line: str) -> list[str]:
        """`line` for a shell in the system, as its user."""
        home = "/root" if self.user == "root" else f"/home/{self.user}"
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": home, "LANG": "C.UTF-8"}
        env |= {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)} | self.env
        given = [f"{name}={value}" for name, value in env.items()]
        inside = f"cd {shlex.quote(self.folder)} && {line}"
        return ["chroot", f"--userspec={self.user}", str(self.root), "env", "-i", *given, "sh", "-c", inside]

    def run(self, line: str) -> str:
        """Runs `line`, shows what it says, and gives it back. SystemExit if it fails."""
        print(f"[{self.user}] {line}", flush=True)
        start = time.monotonic()
        done = subprocess.run(self.command(line), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(
            "\n".join(done.stdout.splitlines()[-8:]),
            f"\n  exit code {done.returncode}, {time.monotonic() - start:.0f} s",
        )
        if done.returncode:
            raise SystemExit(f"failed: {line}")
        return done.stdout

    @contextlib.contextmanager
    def mounted(self):
        """/proc and /dev/shm are in it, inside, and the shared folders, for reading."""
        mounts = [["-t", "proc", "proc", self.root / "proc"], ["-t", "tmpfs", "tmpfs", self.root / "dev/shm"]]
        mounts += [["-o", "bind,ro", place, self.root / place.relative_to("/")] for place in self.shared]
        try:
            for mount in mounts:
                mount[-1].mkdir(parents=True, exist_ok=True)
                subprocess.run(["mount", *mount], check=True)
            yield
        finally:
            for mount in reversed(mounts):
                subprocess.run(["umount", "--lazy", mount[-1]], check=True)

    def copy(self, root: Path) -> System:
        """The same system in another folder."""
        subprocess.run(["cp", "-a", self.root, root], check=True)
        return replace(self, root=root)

    def put(self, files: list[str], folder: str) -> None:
        """Copies files of the checkout into a folder of the system, owned by its user."""
        there = self.root / folder.lstrip("/")
        for name in files:
            (there / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, there / name)
        subprocess.run(["chroot", self.root, "chown", "-R", f"{self.user}:{self.user}", folder], check=True)


def debian(suite: str, root: Path, shared: tuple[Path, ...]) -> System:
    """A system as the image debian:<suite>-slim has it, which reaches what this machine reaches."""
    subprocess.run(["debootstrap", "--variant=minbase", suite, root], check=True, stdout=subprocess.DEVNULL)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    (root / "etc/ssl/certs").mkdir(parents=True, exist_ok=True)
    return System(root, shared)


def trust(system: System) -> None:
    """The certificates of this machine, once the system's own are installed."""
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", system.root / "etc/ssl/certs/ca-certificates.crt")


def checkout() -> list[str]:
    """The files that git knows or would add: those of a clone."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


def built(steps: list[tuple[str, str]], system: System) -> tuple[System, str]:
    """Carries out the steps of one stage; the system afterwards, and its CMD as a command line."""
    command = ""
    for name, text in steps:
        if name == "USER":
            system = replace(system, user=text)
        elif name in ("ARG", "ENV"):
            variable, _, value = text.partition("=")
            system = replace(system, env={**system.env, variable: value})
        elif name == "WORKDIR":
            system = replace(system, folder=text)
        elif name == "COPY":
            if text.split() != [f"--chown={system.user}", ".", "."]:
                raise SystemExit(f"COPY {text}: known here is COPY --chown={system.user} . .")
            system.put(checkout(), system.folder)
        elif name == "RUN":
            system.run(text)
            trust(system)
        elif name == "CMD":
            command = shlex.join(json.loads(text))
    return system, command


def serves(system: System, command: str) -> None:
    """JupyterLab answers at PORT, to its token and to nobody else, and doesn't run as root. SystemExit if not."""
    log = system.root / "tmp" / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(system.command(f"exec {command}"), stdout=file, stderr=file, start_new_session=True)
    try:
        for _ in range(120):
            time.sleep(1)
            if server.poll() is not None:
                raise SystemExit(f"the server stopped: {log.read_text()}")
            if token := re.search(r"127\.0\.0\.1:(\d+)/lab\S*\?token=(\w+)", log.read_text()):
                break
        else:
            raise SystemExit(f"no address within two minutes: {log.read_text()}")
        if int(token[1]) != PORT:
            raise SystemExit(f"it serves at port {token[1]}, not {PORT}")
        page = f"http://127.0.0.1:{PORT}/api/contents/notebooks"
        with urllib.request.urlopen(f"{page}?token={token[2]}", timeout=30) as answer:
            notebooks = [entry["name"] for entry in json.load(answer)["content"] if entry["name"].endswith(".ipynb")]
        try:
            urllib.request.urlopen(page, timeout=30)
            raise SystemExit("it answers without a token")
        except urllib.error.HTTPError as error:
            print(f"JupyterLab at port {PORT}: {len(notebooks)} notebooks with the token, {error.code} without")
        if "--allow-root" in log.read_text():
            raise SystemExit("it runs as root")
    finally:
        os.killpg(server.pid, 15)
        server.wait(60)


def doctor(system: System, python: str) -> None:
    """`helpers doctor` is content, and 00 runs to its end."""
    said = system.run(f"{python} -m helpers doctor")
    if "runs 01_naive" not in said:
        raise SystemExit("the emulator doesn't run")
    system.run(f"{python} -m helpers notebooks 00_start_here")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--share", type=Path, nargs="*", default=[], help="folders of this machine, visible in there")
    shared = tuple(options.parse_args().share)
    steps = instructions((ROOT / "Dockerfile").read_text())
    starts = [i for i, (name, _) in enumerate(steps) if name == "FROM"]
    stages = [steps[a:b] for a, b in zip(starts, [*starts[1:], None])]
    image = re.fullmatch(r"debian:(\w+)-slim AS system", stages[0][0][1])
    if not image or stages[1][0][1] != "system" or len(stages) != 2:
        raise SystemExit("Dockerfile: expected are two stages, debian:SUITE-slim AS system and one from it")
    with tempfile.TemporaryDirectory(prefix="containers-") as scratch:
        bare = debian(image[1], Path(scratch) / "bare", shared)
        base = bare.copy(Path(scratch) / "system")
        with base.mounted():
            base, _ = built(stages[0][1:], base)

        print("\n== Dockerfile", flush=True)
        final = base.copy(Path(scratch) / "final")
        with final.mounted():
            final, command = built(stages[1][1:], final)
            if final.user == "root":
                raise SystemExit("Dockerfile: its user is root")
            serves(final, command)
            doctor(final, ".venv/bin/python")
            print("\n== a kernel for a hub", flush=True)
            final.run("make kernel && .venv/bin/jupyter kernelspec list | grep flashattention-notebooks")
        shutil.rmtree(final.root)

        print("\n== .devcontainer", flush=True)
        container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
        if container["build"]["target"] != "system" or container["remoteUser"] != base.user:
            raise SystemExit("devcontainer.json: its target is to be the stage `system`, its remoteUser that stage's")
        opened = replace(base.copy(Path(scratch) / "opened"), folder="/workspaces/checkout")
        with opened.mounted():
            opened.put(checkout(), opened.folder)
            opened.run(container["postCreateCommand"])
            opened.run(".venv/bin/python -m helpers doctor")
        shutil.rmtree(opened.root)

        print("\n== .binder", flush=True)
        packages = " ".join((ROOT / ".binder/apt.txt").read_text().split())
        with bare.mounted():  # of a base with Python, git and certificates: an environment of its own with JupyterLab
            bare.run(f"apt-get update && apt-get install -y --no-install-recommends {packages} ca-certificates git")
            bare.run("apt-get install -y --no-install-recommends python3-dev python3-venv && useradd -m jovyan")
            trust(bare)
            binder = replace(bare, user="jovyan", folder="/home/jovyan", env={"NB_PYTHON_PREFIX": "/home/jovyan/env"})
            binder.run("python3 -m venv env && env/bin/pip install --quiet jupyterlab")
            binder = replace(binder, folder="/home/jovyan/checkout")
            binder.put(checkout(), binder.folder)
            binder.run("./.binder/postBuild")
            doctor(replace(binder, folder="/home/jovyan/checkout/notebooks"), "/home/jovyan/env/bin/python")
    print("\ncontainers: all steps passed")


if __name__ == "__main__":
    main()
