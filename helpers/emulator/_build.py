import hashlib, os, subprocess, tempfile
from pathlib import Path
from ..errors import CompileError






def build(stem, cpp, flags=(), include=(), libraries=(), depends=()):
    cmd = ["g++", "-std=c++17", "-fPIC", "-shared", *flags, *[f"-I{i}" for i in include]]
    h = hashlib.sha256(repr((cpp, cmd, [str(l) for l in libraries], depends)).encode()).hexdigest()[:16]
    out = Path.home() / ".cache" / "fa_tmp" / f"{stem}_{h}.so"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as d:
            src = Path(d) / "main.cpp"
            src.write_text(cpp)
            r = subprocess.run(
                [*[c for c in cmd if c != "-shared"], "-c", str(src), "-o", f"{d}/out.o"],
                capture_output=True,
                text=True,
            )
            if not r.returncode:
                r = subprocess.run(
                    ["g++", "-shared", f"{d}/out.o", "-o", f"{d}/out.so", *map(str, libraries), "-pthread"],
                    capture_output=True,
                    text=True,
                )
            if r.returncode:
                raise CompileError(r.stderr)
            os.replace(f"{d}/out.so", out)
    return out
