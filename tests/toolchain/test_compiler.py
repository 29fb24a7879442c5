"""Which C++ compiler is found, what it is taken for, and what is said where it won't do."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.toolchain import compiler, lines
from helpers.toolchain.compiler import ToolkitError, emulators_compiler, find_compiler, identify

CLANG = "#define __clang_major__ {0}\n#define __clang_minor__ 1\n#define __clang_patchlevel__ 3\n#define __GNUC__ 4\n"
GCC = "#define __GNUC__ {0}\n#define __GNUC_MINOR__ 2\n#define __GNUC_PATCHLEVEL__ 1\n"
APPLE = CLANG + "#define __apple_build_version__ 16000026\n"
NVIDIA = GCC + "#define __EDG__ 1\n"


def fake(path: Path, macros: str, version: str = "nothing that anybody could read") -> str:
    """A compiler that answers for itself: `version` to --version, `macros` to the preprocessor's -dM."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncase \"$1\" in --version) echo '{version}';; *) cat <<'END'\n{macros}END\nesac\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A PATH with nothing but a shell on it, no CXX, and an environment without compilers."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("FA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "cat").symlink_to("/bin/cat")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    return tmp_path


@pytest.mark.parametrize(
    ("version", "macros", "said"),
    [
        ("Apple clang version 16.0.0 (clang-1600.0.26.6)", APPLE.format(16), "Apple clang 16.1.3"),
        ("g++ (GCC) 14.2.1 20250110 (Red Hat 14.2.1-7)", GCC.format(14), "g++ 14.2.1"),
        ("Apple clang version 15.0.0 (clang-1500.3.9.4)", APPLE.format(15), "Apple clang 15.1.3"),
        ("Ubuntu clang version 18.1.3 (1ubuntu1)", CLANG.format(18), "clang 18.1.3"),
        ("g++ (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0", GCC.format(11), "g++ 11.2.1"),
    ],
)
def test_a_compiler_is_what_its_preprocessor_says(bare, version, macros, said):
    path = fake(bare / "path" / "c++", macros, version)
    assert str(emulators_compiler()) == f"{said} ({path})"


@pytest.mark.parametrize(
    ("macros", "name"),
    [(GCC.format(10), "g++ 10.2.1"), (CLANG.format(15), "clang 15.1.3"), (APPLE.format(14), "Apple clang 14.1.3")],
)
def test_one_too_old_is_refused_with_its_name_and_what_to_install(bare, monkeypatch, macros, name):
    path = fake(bare / "old", macros, "g++ (GCC) 15.1.0")
    monkeypatch.setenv("CXX", path)
    with pytest.raises(ToolkitError) as caught:
        emulators_compiler()
    assert "needs g++ 11, clang 16 (Apple's: 15) or newer, and this is" in str(caught.value)
    assert f"{name} ({path})" in str(caught.value)
    assert all(each in str(caught.value) for each in ("apt install", "dnf install", "brew install", "conda install"))
    assert find_compiler() == path  # nvcc takes it


def test_the_first_that_is_new_enough_is_taken(bare):
    fake(bare / "path" / "c++", GCC.format(9))
    old = fake(bare / "path" / "g++", GCC.format(8))
    assert find_compiler() != old
    for name, macros in (("g++-9", GCC.format(9)), ("g++-13", GCC.format(13)), ("g++-12", GCC.format(12))):
        fake(bare / "path" / name, macros)
    assert Path(find_compiler()).name == "g++-13"


def test_a_conda_environment_that_is_not_activated_has_one(bare):
    path = fake(bare / "prefix" / "bin" / "x86_64-conda-linux-gnu-c++", GCC.format(13))
    assert find_compiler() == path


def test_a_folder_that_can_not_be_read_is_passed_over(bare, monkeypatch):
    glob, closed = Path.glob, bare / "closed"

    def refusing(path, pattern):
        if path == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", refusing)
    monkeypatch.setenv("PATH", f"{closed}{os.pathsep}{bare / 'path'}")
    path = fake(bare / "path" / "c++", GCC.format(13))
    assert find_compiler() == path


def test_pips_ziglang_is_the_last_resort(bare, monkeypatch):
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: name == "ziglang" or None)
    monkeypatch.setattr(sys, "executable", fake(bare / "a folder" / "python", CLANG.format(22)))
    script = find_compiler()
    assert Path(script).parent == bare / "cache" and emulators_compiler().version == (22, 1, 3)
    assert "-m ziglang c++" in Path(script).read_text()
    path = fake(bare / "path" / "clang++-16", CLANG.format(16))
    assert find_compiler() == path


@pytest.mark.parametrize("cxx", ["ccache g++", "no-such-compiler"])
def test_what_CXX_names_is_taken_or_refused_and_never_passed_over(bare, monkeypatch, cxx):
    fake(bare / "path" / "c++", GCC.format(13))
    monkeypatch.setenv("CXX", cxx)
    words = re.escape(f"CXX is {cxx!r}, and there is no such program") + ".*for ccache: a link"
    with pytest.raises(ToolkitError, match=words):
        find_compiler()


def test_what_only_calls_itself_gcc_is_refused(bare):
    path = fake(bare / "path" / "c++", NVIDIA.format(12))
    with pytest.raises(ToolkitError, match="is neither gcc nor clang"):
        identify(path)


def test_every_compiler_on_this_machine_is_known():
    """Against what the compiler's own -dumpversion says, a number and nothing else."""
    for path in compiler.programs("g++", "g++-[0-9]*", "clang++", "clang++-[0-9]*"):
        said = subprocess.run([path, "-dumpversion"], capture_output=True, text=True, check=True).stdout
        assert identify(path).version[0] == int(said.split(".")[0])
        assert identify(path).kind == ("clang" if "clang" in Path(path).name else "gcc")


# --- line numbers


def test_addr2line_and_llvm_symbolizer_name_the_same_lines(tmp_path, monkeypatch):
    source = tmp_path / "here.cpp"
    source.write_text(
        'static inline int inner(int* p) {\n  return *p + 1;\n}\nextern "C" int outer(int* p) {\n  return inner(p);\n}\n'
    )
    library = tmp_path / "here.so"
    flags = ["-g1", "-gdwarf-4", "-O2", "-shared", "-fPIC"]
    subprocess.run([find_compiler(), *flags, str(source), "-o", str(library)], check=True)
    symbols = subprocess.run(["nm", str(library)], capture_output=True, text=True, check=True).stdout
    (address,) = (int(line.split()[0], 16) for line in symbols.splitlines() if line.endswith(" T outer"))
    tools = list(compiler.programs("addr2line", "llvm-symbolizer", "llvm-symbolizer-[0-9]*"))
    assert tools
    for tool in tools:
        monkeypatch.setattr(lines, "find_symbolizer", lambda tool=tool: tool)
        assert lines.places(library, [address + 1])[address + 1] == (str(source), 2), tool


def test_without_a_symbolizer_it_is_said_and_not_dropped(bare):
    with pytest.warns(UserWarning, match="no line numbers.*apt install binutils.*dnf install.*macOS.*conda"):
        assert lines.places(Path("x.so"), [4]) == {4: ("", 0)}


# What atos says of each address; of one that it doesn't know it repeats the address.
ATOS = r"""#!/bin/sh
shift 4  # -o SYMBOLS -i -fullPath
for address; do
  case $address in
    0x10) printf 'inner(int*) (in here.so) (/src/here.cpp:2)\nouter (in here.so) (/src/here.cpp:5)\n\n' ;;
    0x20) printf 'outer (in here.so) (/src/here.cpp:6)\n\n' ;;
    *) printf '%s (in here.so)\n\n' "$address" ;;
  esac
done
"""


def test_on_macos_atos_is_asked(bare, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    atos = bare / "path" / "atos"
    atos.write_text(ATOS)
    atos.chmod(0o755)
    found = lines.places(bare / "here.so", [0x11, 0x21, 0x3A, 0x61])
    assert found[0x11] == ("/src/here.cpp", 2) and found[0x21] == ("/src/here.cpp", 6)
    assert found[0x3A] == found[0x61] == ("", 0)


def test_on_macos_code_without_a_line_has_that_of_the_code_before_it(bare, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    atos = bare / "path" / "atos"
    atos.write_text(ATOS)
    atos.chmod(0o755)
    assert lines.places(bare / "here.so", [0x21 + lines.LINELESS - 1]) == {0x37 + 1: ("/src/here.cpp", 6)}


def test_on_macos_no_flag_is_one_that_its_linker_lacks(monkeypatch):
    from helpers.toolchain import compile

    assert "-Wl,-z,defs" in compile._linker_flags("k")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert compile._linker_flags("k") == ["-Wl,-dead_strip_dylibs", "-Wl,-install_name,@rpath/k.so"]
    code = "import sys; sys.platform = 'darwin'; from helpers.toolchain import guard; print(guard.WRAPPED)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert said.stdout == "[]\n", said.stderr
