"""One build for both back ends: source text in, shared library out, through `torch.utils.cpp_extension.load_inline`.

A library's name is the hash of all that goes into it, so an unchanged source is found at once, and a reverted edit too.
The checkout's own path is left out of the hash: clones of the project share a cache.
Each build runs in a folder of its own, which becomes the cached one by a rename when the build has succeeded: a failed
build leaves nothing to load. Builds run side by side, in one process or in several; a library that is being built is
waited for, and the lock that says so is the operating system's, which releases it when its process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import inspect
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..ladder.errors import CompileError, Interrupted, KernelError
from ..ladder.instances import Instance
from ..ladder.paths import ROOT, cache_folder
from ..ladder.rung import Rung
from .compiler import find_compiler, identify
from .progress import telling
from .toolkit import Toolkit, ToolkitError, find_ninja

Source = TypeVar("Source")

STALE_SECONDS = 3600  # a build folder this old belongs to a process that was killed
ROOM = 64 << 20  # bytes: several builds; what fails without a word where fewer are free has filled the disk

_known = threading.Lock()
_locks: dict[Path, threading.Lock] = {}  # one for each folder of the cache that this process has asked for


@dataclass(frozen=True)
class Built:
    """A shared library: its path, what the compiler said, how long it took, and whether it was there already."""

    path: Path
    log: str
    seconds: float
    cached: bool

    def fa_launch(self, file: str) -> ctypes._CFuncPtr:
        """The launcher that every rung exports. KernelError that names `file` if the library has none."""
        library = ctypes.CDLL(str(self.path))
        if not hasattr(library, "fa_launch"):
            raise KernelError(f'{file} has no `extern "C" cudaError_t fa_launch(const fa_args *, cudaStream_t)`')
        library.fa_launch.restype = ctypes.c_int
        return library.fa_launch


def digest(*parts: object) -> str:
    """A name for what goes into a build: the same for every checkout of the same files."""
    within = rf"{re.escape(str(ROOT))}(?=[/'\"])"  # not a folder beside it whose name begins alike
    return hashlib.sha256(re.sub(within, "<checkout>", repr(parts)).encode()).hexdigest()[:12]


@contextlib.contextmanager
def making(folder: Path, what: str = "") -> Iterator[None]:
    """One thread of one process at a time makes what `folder` of the cache holds, and says so if it takes long; others
    wait, and find it there. Several folders are made side by side."""
    with _known:
        lock = _locks.setdefault(folder, threading.Lock())
    with telling(f"compiling {what}") if what else contextlib.nullcontext(), lock, _alone(folder):
        yield


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process is making `folder`. Where the file system has no locks, or the cache can't be written, one may."""
    path, file = folder.parent / f".lock-{folder.name}", None
    with contextlib.suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        while True:
            file = path.open("w")
            fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                break  # else the process that had it has removed it since
            file.close()
    try:
        yield
    finally:
        if file is not None and not file.closed:
            path.unlink(missing_ok=True)
            file.close()


def build(
    stem: str,
    *,
    cpp: str | Sequence[str] | None = None,
    cuda: str | None = None,
    flags: Sequence[str] = (),
    include: Sequence[Path] = (),
    libraries: Sequence[Path] = (),
    link: Sequence[str] = (),
    depends: Sequence[str] = (),
    toolkit: Toolkit | None = None,
) -> Built:
    """Compiles `cpp` with the host compiler, or `cuda` with `toolkit`'s nvcc, into a shared library. `cpp` may be several
    translation units, compiled side by side.

    `flags` go to the one compiler used; `libraries` are linked by path, and `link` are flags of that; `depends` are the texts of the headers that
    the source reaches.
    Raises CompileError with the compiler's words, ToolkitError if there is no compiler, torch is too old or the cache can't be
    written, or is deleted again and again.
    """
    import torch

    start = time.perf_counter()
    compiler = find_compiler()
    units = [cpp] if isinstance(cpp, str) else list(cpp or [])
    key = [stem, units, cuda, *flags, *map(str, include), *map(str, libraries), *link, *depends]
    key += [torch.__version__, str(identify(compiler)), platform.machine()]
    key += [str(toolkit.home), toolkit.version] if toolkit else []
    target = re.sub(r"[^\w.-]", "_", stem)  # ninja's targets have no blanks in their names
    name = f"{target}_{digest(*key)}"
    folder = cache_folder() / name
    cached = _is_whole(folder)
    if not cached:
        with making(folder, stem):
            rest = list(flags), list(include), list(libraries), list(link), compiler, toolkit
            for _ in range(2):  # once more if the cache is deleted meanwhile
                if not _is_whole(folder):  # else another thread or process was faster
                    shutil.rmtree(folder, ignore_errors=True)
                    _compile(name, folder, units, cuda, *rest)
            if not _is_whole(folder):
                raise ToolkitError(f"{folder.parent} was deleted while {stem} was being compiled: run it again")
    log = (folder / "compiler.log").read_text(errors="replace")
    return Built(folder / (folder / "done").read_text(), log, time.perf_counter() - start, cached)


def side_by_side(compiled: Callable[[Source], Built], sources: Sequence[Source], what: str) -> list[Built]:
    """compiled(source) of each, at once, in their order; one alone in this thread. Raises what the first of them raises,
    Interrupted if it is stopped."""
    if len(sources) == 1:
        return [compiled(sources[0])]
    pool = ThreadPoolExecutor(len(sources))
    try:
        with telling(f"compiling {what}"):
            made = [pool.submit(compiled, source) for source in sources]
            wait(made)
    except KeyboardInterrupt:
        raise Interrupted(f"{what} was being compiled") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return [each.result() for each in made]


def each_instance(compiled: Callable[[Rung], Built], parts: dict[Instance, Rung], what: str) -> dict[Instance, Built]:
    """The library that has an instance, by instance: all sources of `parts`, which several may share, compiled side by side."""
    sources = list(dict.fromkeys(parts.values()))
    built = dict(zip(sources, side_by_side(compiled, sources, what), strict=True))
    return {instance: built[source] for instance, source in parts.items()}


def _is_whole(folder: Path) -> bool:
    """Is all there that a build leaves for `build` to read? What clears old files out of caches may have taken a part."""
    done = folder / "done"
    if not (done.exists() and (folder / "compiler.log").exists()):
        return False
    library = folder / done.read_text()
    return library.is_file() and library.stat().st_size > 0  # a power cut leaves empty files


def _compile(
    name: str,
    folder: Path,
    units: list[str],
    cuda: str | None,
    flags: list[str],
    include: list[Path],
    libraries: list[Path],
    link: list[str],
    compiler: str,
    toolkit: Toolkit | None,
) -> None:
    """Makes `folder`; doesn't, without a word, if the cache is deleted meanwhile. Raises as `build` does."""
    import torch
    from torch.utils import cpp_extension

    if "no_implicit_headers" not in inspect.signature(cpp_extension.load_inline).parameters:
        raise ToolkitError(f"torch {torch.__version__} is too old: `pip install -U torch`")
    for place, fix in ((ROOT, "move the checkout"), (folder.parent, "name another folder in FA_CACHE")):
        if "$" in str(place):
            raise ToolkitError(f"{place} has a $ in its path, which ninja can't take: {fix}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        ldflags = _linker_flags(name) + link
        private = Path(tempfile.mkdtemp(prefix=f".building-{os.getpid()}-", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder.parent, error) from None
    _remove_abandoned(folder.parent)
    log = private / "compiler.log"
    log.touch()
    # What the library says of source files (__FILE__, debug information) is from the checkout's root: it serves every clone.
    places = [] if cuda else [shlex.quote(f"-ffile-prefix-map={ROOT}/=")]
    # The compiler's own words, without ninja's around them: flags reach a shell, so they can redirect.
    redirected = [*flags, *places, f"2>>{log.name}"]
    for library in libraries:
        ldflags += [str(library), f"-Wl,-rpath,{library.parent}"]
    if toolkit:
        ldflags.append(f"-L{_cudart_folder(toolkit)}")
    ldflags = [shlex.quote(flag) for flag in ldflags]
    common = dict(
        extra_cflags=redirected if units else [],
        extra_cuda_cflags=redirected if cuda else [],
        extra_ldflags=ldflags,
        extra_include_paths=[str(path) for path in include],
        build_directory=str(private),
        with_cuda=cuda is not None,
        is_python_module=False,
    )
    objects = ["cuda.cuda.o" if cuda else "main.o"]
    try:
        with _environment(compiler, toolkit):
            if len(units) < 2:
                cpp_extension.load_inline(
                    name,
                    cpp_sources="".join(units),
                    cuda_sources=cuda,
                    no_implicit_headers=True,
                    **common,
                )
            else:  # load_inline would make one of them
                sources = [private / f"main_{i}.cpp" for i in range(len(units))]
                objects = [source.with_suffix(".o").name for source in sources]
                for source, text in zip(sources, units, strict=True):
                    source.write_text(text)
                cpp_extension.load(name, [str(source) for source in sources], **common)
        (library,) = private.glob("*.so")
        if sys.platform == "darwin":  # there debug information is in the objects alone
            subprocess.run(["dsymutil", str(library)], capture_output=True, check=False)
        for made in private.glob("*.o"):  # half of a build's size, and nothing reads them any more
            made.unlink()
        (private / "done").write_text(library.name)
        # Where nothing was locked, another process may have been faster: its library is as good.
        with contextlib.suppress(OSError):
            private.rename(folder)
    except ToolkitError:
        raise
    except KeyboardInterrupt:
        raise Interrupted(f"{name.rpartition('_')[0]} was being compiled") from None
    except Exception as error:  # load_inline raises RuntimeError, and its cause is the whole ninja log
        if not all(file.exists() for file in (log, *libraries)):
            return  # the cache has been deleted
        compiled = all((private / each).exists() for each in objects)
        try:
            if not log.stat().st_size:  # a full disk has no room for the compiler's words either
                (private / "probe").write_bytes(os.urandom(1 << 20))
                if not compiled and shutil.disk_usage(private).free < ROOM:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as full:
            raise _unwritable(folder.parent, full) from None
        words = _linkers_words(str(error)) if compiled else log.read_text(errors="replace") or str(error)
        raise CompileError(_tidy(words, private)) from None
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _unwritable(cache: Path, error: OSError) -> ToolkitError:
    why = f"can't write to {cache}, where built kernels are kept: {error.strerror}"
    return ToolkitError(f"{why}; name another folder in FA_CACHE")


def _linker_flags(name: str) -> list[str]:
    """No rung needs libtorch, and loading it is not free; a function nobody defines is the linker's to name, not dlopen's. On
    macOS torch leaves that to dlopen, and a library is found by the name it has inside."""
    if sys.platform == "darwin":
        return ["-Wl,-dead_strip_dylibs", f"-Wl,-install_name,@rpath/{name}.so"]
    return ["-Wl,--as-needed", "-Wl,-z,defs", f"-L{_instead_of_torch()}"]


# What load_inline names to the linker, on a machine with CUDA and without.
_OF_TORCH = ("c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda", "torch_python")


def _instead_of_torch() -> Path:
    """A folder with an empty linker script by the name of each of torch's libraries, through whose symbols the linker would look
    after every edit, to find that none is needed."""
    folder = cache_folder() / "instead-of-torch"
    folder.mkdir(parents=True, exist_ok=True)
    for script in (folder / f"lib{name}.so" for name in _OF_TORCH):
        if not script.exists():
            with tempfile.TemporaryDirectory(dir=folder) as private:
                new = Path(private) / script.name
                new.write_text("/* nothing */")
                new.replace(script)
    return folder


def _linkers_words(ninja: str) -> str:
    """What follows the failed command in ninja's output: the compiler had nothing to say against the source."""
    ninja = re.sub(r"\x1b\[[0-9;]*m", "", ninja)  # in a notebook it writes in colour
    match = re.search(r"^FAILED:.*\n.*\n(?P<said>[\s\S]*?)(?:^ninja: |\Z)", ninja, re.MULTILINE)
    return match["said"] if match else ninja


def _tidy(words: str, private: Path) -> str:
    """Without the build folder, which is gone, the checkout's path, and nvcc's count of errors at the end."""
    words = words.replace(f"{private}/", "").replace(f"{ROOT}/", "")
    words = re.sub(r"^\d+ errors? detected in the compilation of .*$", "", words, flags=re.MULTILINE).strip()
    names = r"\b(?:fa_(?:model_|backward_)?args|cudaError_t|cudaStream_t|__global__)\b"
    unknown = "undefined|not declared|does not name|not been declared"
    missing = re.search(rf"{names}.*(?:{unknown})|(?:{unknown}).*{names}", words)
    hint = (
        "\nhint: `#include <fa/args.cuh>` declares fa_args and CUDA's own names, <fa/model.cuh> the larger structs"
        if missing
        else ""
    )
    return _each_once(words) + hint


_DIAGNOSTIC = re.compile(r"^(?P<place>[^\s:(][^:(]*[:(]\d+)(?:\)|:\d+)?: (?P<words>(?:fatal )?(?:error|warning)\b.*)")
_CONTEXT = re.compile(r"^(?:\S+: In |\S+:\d+:\d+:\s+(?:required|recursively required|in ‘constexpr’)|In file included)")


def _each_once(words: str) -> str:
    """A compiler's words with every error told once, not for each instance of its template."""
    blocks: list[list[str]] = [[]]
    known, keys, complete = set(), [""], False  # complete: the block has its error
    for line in words.splitlines():
        found = _DIAGNOSTIC.match(line)
        if complete and (found or _CONTEXT.match(line)):
            blocks.append([]), keys.append("")
            complete = False
        blocks[-1].append(line)
        if found:
            keys[-1], complete = f"{found['place']} {found['words']}", True
    kept = []
    for key, block in zip(keys, blocks, strict=True):
        if not key or key not in known:
            kept += block
        known.add(key)
    return "\n".join(kept)


def _remove_abandoned(cache: Path) -> None:
    for folder in cache.glob(".building-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _cudart_folder(toolkit: Toolkit) -> Path:
    """A folder with libcudart.so. The wheels have only libcudart.so.13, so the cache gets a link to it."""
    for sub in ("lib64", "lib"):
        if (toolkit.home / sub / "libcudart.so").exists():
            return toolkit.home / sub
    (library,) = (toolkit.home / "lib").glob("libcudart.so.*")
    folder = cache_folder() / f"cudart-{toolkit.version}"
    link = folder / "libcudart.so"
    if not link.exists():  # or it leads to an environment that is gone
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as private:
            made = Path(private) / link.name
            made.symlink_to(library)
            made.replace(link)
    return folder


@contextlib.contextmanager
def _set_environment(compiler: str, toolkit: Toolkit | None) -> Iterator[None]:
    """What torch takes from its surroundings, for a build: ninja on PATH (a kernel of an unactivated venv doesn't have
    it), the host compiler (for nvcc by CC), CUDA_HOME, and its own folder's name, which may have a blank in it. When it loads a
    library it changes Python's flags for dlopen, and threads that do so together wouldn't change them back."""
    from torch.utils import cpp_extension

    ours = {"PATH": f"{find_ninja()}{os.pathsep}{os.environ.get('PATH', '')}", "CXX": compiler}
    if toolkit:
        ours["CC"] = shlex.quote(compiler)  # torch doesn't quote it for the shell
    theirs, home = {name: os.environ.get(name) for name in ours}, cpp_extension.CUDA_HOME
    torch_lib, dlopen = cpp_extension.TORCH_LIB_PATH, sys.getdlopenflags()
    os.environ.update(ours)
    cpp_extension.TORCH_LIB_PATH = shlex.quote(torch_lib)  # nor this
    if toolkit:
        cpp_extension.CUDA_HOME = str(toolkit.home)
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME, cpp_extension.TORCH_LIB_PATH = home, torch_lib
        sys.setdlopenflags(dlopen)
        for name, value in theirs.items():
            if os.environ.get(name) != ours[name]:
                continue  # somebody has changed it meanwhile
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Shared:
    """A context that several threads may be in together if they have asked for the same one; others wait until it is free."""

    def __init__(self, context: Callable[..., contextlib.AbstractContextManager[None]]) -> None:
        self._context, self._changed, self._users = context, threading.Condition(), 0

    @contextlib.contextmanager
    def __call__(self, *arguments: object) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._users or self._arguments == arguments)
            if not self._users:
                self._inside, self._arguments = self._context(*arguments), arguments
                self._inside.__enter__()
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                if not self._users:
                    self._inside.__exit__(None, None, None)
                    self._changed.notify_all()


_environment = Shared(_set_environment)
