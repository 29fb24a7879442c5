"""The content-addressed build: never an old binary, never compiled twice, and nothing left of what failed or was killed."""

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from emulated import ctrl_c
from torch.utils import cpp_extension

from helpers import CompileError, KernelError
from helpers.ladder.errors import Interrupted
from helpers.toolchain import compile as build
from helpers.toolchain import toolkit
from helpers.toolchain.compile import build as compile_
from helpers.toolchain.toolkit import ToolkitError

ROOT = Path(__file__).parents[2]


def answer(n: int, **more) -> build.Built:
    return compile_("answer", cpp=f'extern "C" int answer() {{ return {n}; }}\n', **more)


def call(built: build.Built) -> int:
    return ctypes.CDLL(str(built.path)).answer()


def test_unchanged_and_reverted_sources_are_not_compiled_again(cache):
    assert [answer(1).cached, answer(2).cached] == [False, False]
    assert [answer(1).cached, answer(2).cached] == [True, True]
    assert [call(answer(1)), call(answer(2))] == [1, 2]


def test_flags_headers_and_libraries_are_part_of_the_name(cache):
    paths = {answer(1).path, answer(1, flags=["-O1"]).path, answer(1, depends=["a header"]).path}
    paths.add(answer(1, libraries=[answer(2).path]).path)
    assert len(paths) == 4


def test_flags_of_the_linker_the_toolkit_and_the_compiler_are_part_of_the_name(cache, monkeypatch):
    def compiled(name, folder, *rest):
        folder.mkdir(parents=True)
        for file, text in (("done", "x.so"), ("x.so", "x"), ("compiler.log", "")):
            (folder / file).write_text(text)

    monkeypatch.setattr(build, "_compile", compiled)
    paths = {answer(1).path, answer(1, link=["-lm"]).path}
    for home, version in (("/a", "13.0"), ("/a", "13.1"), ("/b", "13.0")):
        paths.add(answer(1, toolkit=toolkit.Toolkit(Path(home), version, "PATH")).path)
    monkeypatch.setattr(build, "identify", lambda compiler: "another")
    assert len(paths | {answer(1).path}) == 6


def test_an_edited_header_is_seen_in_the_same_process(cache, tmp_path):
    header = tmp_path / "value.h"

    def built() -> int:
        source = '#include <value.h>\nextern "C" int answer() { return VALUE; }\n'
        return call(compile_("answer", cpp=source, include=[tmp_path], depends=[header.read_text()]))

    header.write_text("#define VALUE 1\n")
    assert built() == 1
    header.write_text("#define VALUE 2\n")
    assert built() == 2


def test_a_failed_build_leaves_nothing_to_load(cache):
    assert call(answer(1)) == 1
    for _ in range(2):  # and fails again, as long as the source is wrong
        with pytest.raises(CompileError):
            compile_("answer", cpp="int answer( {\n")
    assert call(answer(3)) == 3
    assert not list(cache.glob(".building-*"))


@pytest.mark.parametrize("lost", ["done", "compiler.log", "*.so"])
def test_a_build_that_has_lost_a_file_is_made_again(cache, lost):
    (file,) = answer(1).path.parent.glob(lost)
    file.unlink()
    assert not answer(1).cached
    assert answer(1).cached and call(answer(1)) == 1


@pytest.mark.parametrize("emptied", ["done", "*.so"])
def test_a_build_with_a_file_that_a_power_cut_has_left_empty_is_made_again(cache, emptied):
    (file,) = answer(1).path.parent.glob(emptied)
    file.unlink()  # it is loaded: cut short, it would take this process along
    file.touch()
    assert not answer(1).cached
    assert answer(1).cached and call(answer(1)) == 1


def test_objects_are_not_kept(cache):
    answer(1)
    compile_("answer", cpp=["int one;\n", "int other;\n"])
    assert len(list(cache.glob("answer_*/*.so"))) == 2 and not list(cache.glob("answer_*/*.o"))


def test_a_link_into_an_environment_that_is_gone_is_renewed(cache, tmp_path):
    """All environments that share the cache link with the libcudart that it leads to."""
    for environment in (tmp_path / "old", tmp_path / "new"):
        library = environment / "lib" / "libcudart.so.13"
        library.parent.mkdir(parents=True)
        library.touch()
        folder = build._cudart_folder(toolkit.Toolkit(environment, "13.0.1", "pip"))
        assert (folder / "libcudart.so").resolve() == library and len(list(folder.iterdir())) == 1
        shutil.rmtree(environment)


def test_a_compile_error_shows_the_readers_line_once_and_nothing_of_the_machinery(cache):
    with pytest.raises(CompileError) as caught:
        compile_("answer", cpp='#line 1 "mine.cu"\nint one;\nint two = three;\n')
    text = str(caught.value)
    assert text.count("mine.cu:2:11: error: ‘three’ was not declared") + text.count("mine.cu:2:11: error: use of") == 1
    assert "ninja" not in text and "Traceback" not in text and str(cache) not in text
    assert caught.value._render_traceback_() == [f"CompileError: {text}"]


def test_folders_may_have_blanks_in_their_names(tmp_path, monkeypatch):
    monkeypatch.setenv("FA_CACHE", str(tmp_path / "a cache"))
    torch_lib = tmp_path / "torch's own"
    torch_lib.symlink_to(cpp_extension.TORCH_LIB_PATH)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(torch_lib))
    assert call(answer(1, libraries=[answer(2).path])) == 1


def test_a_file_may_have_a_blank_in_its_name(cache):
    assert call(compile_("my kernél", cpp='extern "C" int answer() { return 3; }\n')) == 3


def test_a_cache_that_cannot_be_written_is_named_with_its_fix(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ToolkitError, match=r"can't write to .*file/cache, .*; name another folder in FA_CACHE"):
        compile_("answer", cpp="int answer;\n")


def test_a_full_disk_is_named_with_its_fix(cache, monkeypatch):
    """It has no room for the compiler's words either."""

    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    def failed(*_, **__):
        raise RuntimeError("Error building extension")

    monkeypatch.setattr(cpp_extension, "load", failed)
    with pytest.raises(CompileError, match="Error building extension"):
        compile_("answer", cpp=["int one;\n", "int other;\n"])
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ToolkitError, match=r"can't write to .*: No space left on device; name another folder in FA"):
        compile_("answer", cpp=["int one;\n", "int other;\n"])
    assert not list(cache.glob(".building-*"))


def test_a_disk_that_is_full_but_for_a_little_is_named_too(cache, monkeypatch):
    """What filled it was deleted when the compiler failed."""

    def failed(*_, **__):
        raise RuntimeError("Error building extension")

    monkeypatch.setattr(cpp_extension, "load", failed)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2 << 20, 0, 2 << 20))
    with pytest.raises(ToolkitError, match=r"can't write to .*: No space left on device; name another folder in FA"):
        compile_("answer", cpp=["int one;\n", "int other;\n"])


@pytest.mark.parametrize("when", ["before the compiler", "after it"])
def test_a_cache_that_is_deleted_during_a_build_is_made_again(cache, monkeypatch, when):
    load_inline, calls = cpp_extension.load_inline, []

    def deleting(*arguments, **named):
        calls.append(1)
        if when == "after it":
            load_inline(*arguments, **named)
        if len(calls) <= times:
            shutil.rmtree(cache)
        if when != "after it":
            load_inline(*arguments, **named)

    monkeypatch.setattr(cpp_extension, "load_inline", functools.wraps(load_inline)(deleting))
    times = 1
    assert call(answer(1)) == 1 and len(calls) == 2
    deleted = r" was deleted while answer was being compiled: run it again$"
    times = 99
    with pytest.raises(ToolkitError, match=deleted):
        answer(2)
    times = 0
    library = answer(3).path  # of the cache as well, as the emulator is
    times = len(calls) + 1
    with pytest.raises(ToolkitError, match=deleted):
        answer(4, libraries=[library])


def test_a_path_that_ninja_can_not_take_is_named_with_its_fix(tmp_path, monkeypatch):
    monkeypatch.setenv("FA_CACHE", str(tmp_path / "a$b"))
    with pytest.raises(ToolkitError, match=r"/a\$b has a \$ in its path, .*: name another folder in FA_CACHE"):
        answer(1)
    monkeypatch.setattr(build, "ROOT", tmp_path / "series$")
    with pytest.raises(ToolkitError, match=r"/series\$ has a \$ in its path, .*: move the checkout"):
        answer(1)


def test_a_torch_that_is_too_old_is_named_with_its_fix(cache, monkeypatch):
    monkeypatch.setattr(cpp_extension, "load_inline", lambda name, cpp_sources, cuda_sources=None: None)
    with pytest.raises(ToolkitError, match=r"^torch \S+ is too old: `pip install -U torch`$"):
        answer(1)


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("FA_CACHE", "~/fa")
    assert build.cache_folder() == Path("/home/me/fa")
    monkeypatch.delenv("FA_CACHE")
    for base, found in (("/caches", "/caches"), ("caches", "/home/me/.cache"), ("", "/home/me/.cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert build.cache_folder() == Path(found) / "flashattention-notebooks"


def test_a_launch_error_is_shown_with_the_readers_own_line():
    def fail():
        raise KernelError("out of bounds")

    namespace = {"fail": fail}
    with pytest.raises(KernelError) as caught:
        exec(compile("fail()\n", "cell", "exec"), namespace)
    assert caught.value._render_traceback_()[-1] == "KernelError: out of bounds"
    assert KernelError("never raised")._render_traceback_() == ["KernelError: never raised"]


@pytest.mark.parametrize("colour", ["0", "1"])  # Jupyter's kernels ask for colour
def test_a_function_nobody_defines_is_named_by_the_linker(cache, monkeypatch, colour):
    monkeypatch.setenv("CLICOLOR_FORCE", colour)
    with pytest.raises(CompileError, match=r"undefined (reference to|symbol).*nobody\(\)") as caught:
        compile_("answer", cpp='int nobody();\nextern "C" int answer() { return nobody(); }\n')
    text = str(caught.value)
    assert "ninja" not in text and "FAILED" not in text and str(cache) not in text


@pytest.mark.skipif(sys.platform == "darwin", reason="its linker takes no scripts")
def test_the_linker_does_not_look_through_torchs_libraries(cache, tmp_path):
    """load_inline names them, and no rung needs one. Those of CUDA, which a CPU build of torch lacks, test_nvcc.py can't link without."""
    said = tmp_path / "map"
    compile_("answer", cpp='extern "C" int answer() { return 1; }\n', link=[f"-Wl,-Map={said}"])
    assert "instead-of-torch/libtorch_cpu.so" in said.read_text()
    assert cpp_extension.TORCH_LIB_PATH not in said.read_text()


def test_an_interrupted_build_never_hangs_the_next(cache):
    """A process killed in the middle leaves its folder, with torch's lock file in it; the next build doesn't look there."""
    slow = "#include <vector>\n" + "\n".join(f"template struct std::vector<int[{i}]>;" for i in range(1, 400))
    code = f"from helpers.toolchain import build; build('answer', cpp={slow!r})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not list(cache.glob(".building-*/lock")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    (left,) = cache.glob(".building-*")
    assert (left / "lock").exists()
    assert call(answer(1)) == 1

    old = time.time() - 2 * build.STALE_SECONDS
    os.utime(left, (old, old))
    answer(2)
    assert not left.exists()


def test_builds_run_side_by_side_and_the_same_one_once(cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    before, at_once, compiles = (os.environ["PATH"], sys.getdlopenflags()), [], []
    really = cpp_extension.load_inline

    @functools.wraps(really)
    def watched(name, **how):
        compiles.append(name)
        both.wait(timeout=600)  # nobody compiles before two want to
        at_once.append(len(list(cache.glob(".building-*"))))
        return really(name, **how)

    both = threading.Barrier(2)
    monkeypatch.setattr(cpp_extension, "load_inline", watched)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(answer, [1, 2, 1, 2]))
    assert [call(one) for one in found] == [1, 2, 1, 2]
    assert len(compiles) == 2 and max(at_once) == 2
    assert (os.environ["PATH"], sys.getdlopenflags()) == before and "CXX" not in os.environ


def test_what_somebody_sets_during_a_build_stays(monkeypatch):
    monkeypatch.setenv("CXX", "before")
    with build._set_environment("c++", None):
        os.environ["CXX"] = "set meanwhile"
    assert os.environ["CXX"] == "set meanwhile"


def test_a_build_for_another_compiler_waits_for_those_under_way():
    inside, most = [], []

    @contextlib.contextmanager
    def context(what):
        assert not inside
        inside.append(what)
        yield
        inside.remove(what)

    shared = build.Shared(context)

    def work(what):
        with shared(what):
            assert inside == [what]
            most.append(shared._users)
            time.sleep(0.02)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, "aabbabab"))
    assert not inside and len(most) == 8 and max(most) > 1


def test_several_units_are_one_library_and_an_error_in_one_is_told(cache):
    units = ["int half() { return 21; }\n", 'int half();\nextern "C" int answer() { return 2 * half(); }\n']
    assert call(compile_("answer", cpp=units)) == 42
    with pytest.raises(CompileError, match=r"mine\.cpp:1:\d+: error"):
        compile_("answer", cpp=[units[0], '#line 1 "mine.cpp"\nint two = three;\n'])
    with pytest.raises(CompileError, match="undefined"):
        compile_("answer", cpp=[units[1], "int other;\n"])


def test_ninja_is_found_without_an_activated_environment(cache, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert call(answer(1)) == 1
    assert os.environ["PATH"] == "/usr/bin:/bin"


def test_a_missing_compiler_is_one_sentence_that_names_the_fix(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(toolkit.ToolkitError, match=r"^no C\+\+ compiler found: install one .*apt install g\+\+"):
        answer(1)


# --- what a reader sees


def test_a_call_that_breaks_the_contract_is_a_value_error_in_two_lines():
    import torch

    from helpers import load

    with pytest.raises(ValueError) as caught:
        load("04_fa2_fp32", device="cpu", quiet=True)(*torch.zeros(3, 1, 1, 4, 48))
    said = caught.value._render_traceback_()
    assert (
        len(said) == 2
        and "torch.zeros(3, 1, 1, 4, 48)" in said[0]
        and said[1].startswith("ValueError: head dimension 48")
    )


GXX = """x.cu: In instantiation of ‘void k(fa_args) [with int d = {d}]’:
x.cu:9:84:   required from here
x.cu:2:84: error: ‘q’ was not declared in this scope
    2 | template <int d> q
x.cu:2:84: note: suggested alternative: ‘Q’"""
NVCC = """x.cu(2): error: identifier "q" is undefined
    q;
          detected during instantiation of "void k<d>(fa_args) [with d={d}]" at line 9"""


@pytest.mark.parametrize("said", [GXX, NVCC], ids=["g++", "nvcc"])
def test_an_error_in_a_template_is_told_once(said):
    other = said.replace(":2:", ":3:").replace("(2)", "(3)")
    words = "\n".join([said.format(d=32), other.format(d=32), said.format(d=64), other.format(d=64)])
    assert build._each_once(words) == "\n".join([said.format(d=32), other.format(d=32)])
    assert build._each_once("no diagnostic\nat all") == "no diagnostic\nat all"


@pytest.mark.parametrize(
    "words",
    ["cell:3:12: error: ‘cudaError_t’ does not name a type", 'cell(2): error: identifier "fa_args" is undefined'],
)
def test_a_missing_include_is_named(words):
    assert build._tidy(words, Path("/nowhere")).endswith("larger structs") and "<fa/args.cuh>" in build._tidy(
        words, Path("/x")
    )
    assert "hint" not in build._tidy('cell(2): error: identifier "q" is undefined in fa_launch', Path("/nowhere"))


# --- several processes, several checkouts

CLONE = """
from dataclasses import replace
import torch
from helpers import KernelError, load, rung
naive = rung("01_naive")
wrong = replace(naive, source=naive.replace("if (i >= a.Nq || c >= a.D) return;", ""))
kernel = load(wrong, device="cpu", quiet=True)
try:
    kernel(*torch.randn(3, 1, 1, 7, 33))
except KernelError as error:
    print(kernel.launcher.cached, str(error).splitlines()[0])
"""


def test_a_clone_finds_what_another_has_built_and_names_its_own_files(tmp_path):
    """But for the first line, which says whether it was there already, both say the same."""
    for folder in ("helpers", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "data").mkdir()
    said = [
        subprocess.run([sys.executable, "-c", CLONE], cwd=checkout, capture_output=True, text=True, check=True).stdout
        for checkout in (ROOT, tmp_path)
    ]
    here, there = (text.split(" ", 1) for text in said)
    assert there[0] == "True" and here[1] == there[1]
    assert re.match(r"kernels/01_naive\.cu:\d+: out of bounds in ", there[1])


def test_two_processes_compile_once_what_both_need(cache):
    """The second waits for the first, and finds the library."""
    code = textwrap.dedent("""
        import ctypes, time
        from helpers.toolchain import compile
        really = compile._compile
        compile._compile = lambda *args: (print("compiles"), time.sleep(2), really(*args))
        built = compile.build("answer", cpp='extern "C" int answer() { return 7; }')
        print(ctypes.CDLL(str(built.path)).answer())
    """)
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0].split() for process in processes]
    assert sorted(said) == [["7"], ["compiles", "7"]] and len(list(cache.glob("answer_*"))) == 1


def test_a_lock_is_gone_with_the_process_that_held_it(cache):
    code = "import time\nfrom pathlib import Path\nfrom helpers.toolchain import compile\n"
    code += (
        f"with compile.making(Path({str(cache)!r}) / 'answer'):\n    print('locked', flush=True)\n    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    lock = cache / ".lock-answer"
    with lock.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    process.kill()
    process.wait()
    with build.making(cache / "answer"):
        assert lock.exists()
    assert not lock.exists()


def test_what_is_built_side_by_side_comes_in_its_order():
    together = threading.Barrier(3)

    def built(n: int) -> int:
        together.wait(10)
        time.sleep(0.1 * n)
        return n

    assert build.side_by_side(built, [2, 0, 1], "three") == [2, 0, 1]


def test_the_first_that_fails_is_told_when_all_are_done():
    done = []

    def built(n: int) -> None:
        time.sleep(0.1 * n)
        done.append(n)
        if n:
            raise CompileError(f"the one of {n}")

    with pytest.raises(CompileError, match="the one of 2"):
        build.side_by_side(built, [0, 2, 1], "three")
    assert done == [0, 1, 2]


def test_ctrl_c_does_not_wait_for_what_is_built_side_by_side():
    start = time.monotonic()
    with pytest.raises(Interrupted, match="two was being compiled"), ctrl_c(0.2):
        build.side_by_side(time.sleep, [3, 3], "two")
    assert time.monotonic() - start < 2
