"""Compiles the data plane: from the C++ sources beside this file to one shared library.

In: the sources, and a compiler that knows C++20: `$CXX`, c++, g++ or clang++, else that of the package `ziglang`. Out: a
library that exports the functions of include/helixrt_native.h alone.

- The wheel build (build_tools/) calls `compile_library`, and ships the library in this folder.
- Elsewhere `library_path` compiles on first use, into a folder of the user's (`cache_folders`). The file's name has a digest of
  the sources, the compiler and its flags. Of several processes that need it at once, one compiles and the others wait.

By hand: `python -m helixrt.native.build [--sanitize address|thread|undefined] [--out PATH]` prints the path of the library.
It imports the standard library and helixrt's errors alone, since it also runs where nothing is installed yet.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from helixrt.errors import ConfigError

log = logging.getLogger("helixrt.native")

FOLDER = Path(__file__).resolve().parent
LIBRARY = "libhelixrt_native.so"
SANITIZERS = ("address", "thread", "undefined")
GLIBC = "2.17"  # the oldest that zig's libraries ask for: that of the tag manylinux_2_17
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-fno-semantic-interposition", "-fvisibility-inlines-hidden")
EXPORTED = "{ global: hx_*; local: *; };\n"  # a static C++ library in ours would show its names to others
PROCESSES = 2  # that compile at once: ranks train on the same machine
COMPILE_S = 600.0  # one file; zig's first compilation builds its C++ library
KEPT_S = 30 * 24 * 3600.0  # a library of other sources or another compiler
_LINK = ("-shared", "-Wl,--gc-sections")
_MARK = "helixrt-native-sources:"  # in the library, before the digest of its sources
_PROBE = """\
#include <atomic>
#include <bit>
#include <span>
#include <vector>
template <typename T> concept Number = requires(T a) { a + a; };
template <Number T> T twice(std::span<const T> of) { return of[0] + of[0]; }
extern "C" int hx_probe(int x) {
  std::vector<int> numbers{x};
  std::atomic<int> bits{std::popcount(unsigned(x))};
  return twice<int>(numbers) + bits.load();
}
"""


@dataclass(frozen=True, slots=True)
class Compiler:
    """`command` compiles C++; `identity` changes with its version."""

    command: tuple[str, ...]
    identity: str
    zig: bool = False

    def flags(self, sanitize: str = "") -> tuple[str, ...]:
        """Of compiling and linking."""
        found: tuple[str, ...] = FLAGS
        if self.zig:
            found = (*found, "-fno-sanitize=all")  # zig adds checks of undefined behaviour by itself
        if sanitize:
            found = (*found, f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-g", "-O1")
        return found


# ---- compilers


def compilers() -> Iterator[Compiler]:
    """Those of this machine, in the order in which they are tried; whether they know C++20 is not known yet."""
    given = os.environ.get("CXX", "")
    for name in dict.fromkeys((given, "c++", "g++", "clang++")):
        words = shlex.split(name)
        if words and (path := shutil.which(words[0])):
            yield Compiler((path, *words[1:]), f"{name} {_identity(path)}", zig="ziglang" in words or Path(path).name == "zig")
    if (found := zig()) is not None:
        yield found


def zig() -> Compiler | None:
    """The compiler of the package `ziglang`, if that is installed."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        return None
    target = f"{platform.machine()}-linux-gnu.{GLIBC}"
    identity = f"ziglang {target} {_identity(str(Path(spec.origin).with_name('zig')))}"
    return Compiler((sys.executable, "-m", "ziglang", "c++", "-target", target), identity, zig=True)


def _identity(path: str) -> str:
    """Changes when the program is replaced by another version, and costs no process."""
    file = os.path.realpath(path)
    try:
        status = os.stat(file)
    except OSError:
        return file
    return f"{file} {status.st_size} {status.st_mtime_ns}"


def find_compiler(sanitize: str = "") -> Compiler:
    """The first one that compiles C++20. Raises ConfigError where there is none."""
    for compiler in compilers():
        if works(compiler, sanitize):
            return compiler
    raise no_compiler()


def no_compiler() -> ConfigError:
    return ConfigError(
        "CXX",
        os.environ.get("CXX", ""),
        "no compiler for C++20 was found, which helixrt's data plane needs once; install g++ (10 or newer) or clang++, or run: "
        "pip install ziglang",
    )


def works(compiler: Compiler, sanitize: str = "") -> bool:
    """Whether it makes a library of a few lines of C++20."""
    with tempfile.TemporaryDirectory(prefix="helixrt-") as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(_PROBE)
        command = (*compiler.command, *compiler.flags(sanitize), "-shared", str(source), "-o", str(source.with_suffix(".so")))
        return _run(command, folder).returncode == 0


# ---- sources


def sources() -> list[Path]:
    """What is compiled, each by itself."""
    return sorted([*FOLDER.glob("src/*.cpp"), *FOLDER.glob("src/host/*.cpp")])


def headers() -> list[Path]:
    return sorted([*FOLDER.glob("src/*.hpp"), *FOLDER.glob("src/host/*.hpp"), *FOLDER.glob("include/*.h")])


def digest_of_sources() -> str:
    found = hashlib.sha256()
    for path in (*sources(), *headers()):
        content = path.read_bytes()
        found.update(f"{path.relative_to(FOLDER).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()


def _digest(compiler: Compiler, sanitize: str) -> str:
    text = "\n".join((digest_of_sources(), compiler.identity, *compiler.flags(sanitize), *_LINK, EXPORTED))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- compiling


def compile_library(
    out: Path, compiler: Compiler, sanitize: str = "", files: Sequence[Path] | None = None, exported: str = EXPORTED
) -> None:
    """Compile `files` (default: all sources) to the library `out`, which appears whole or not at all.

    Raises ConfigError with the compiler's first complaint.
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="helixrt-") as folder:
        mark = Path(folder, "digest.cpp")
        text = f"{_MARK}{digest_of_sources()}"
        mark.write_text(f'extern "C" {{ extern const char hx_sources[]; }}\nconst char hx_sources[] = "{text}";\n')
        script = Path(folder, "exported.map")
        script.write_text(exported)
        flags = compiler.flags(sanitize)

        def compile_one(number: int, source: Path) -> Path:
            made = Path(folder, f"{number}.o")
            include = (f"-I{FOLDER / 'include'}", f"-I{FOLDER / 'src'}")
            _must_run((*compiler.command, *flags, *include, "-ffunction-sections", "-c", str(source), "-o", str(made)), folder)
            return made

        with ThreadPoolExecutor(min(PROCESSES, os.cpu_count() or 1), "helixrt-compile") as pool:
            todo = list(enumerate((*(sources() if files is None else files), mark)))
            objects = list(pool.map(lambda each: compile_one(*each), todo))
        whole = out.with_name(f".{out.name}.{os.getpid()}")
        try:
            link = (*_LINK, f"-Wl,--version-script={script}", *map(str, objects), "-o", str(whole))
            _must_run((*compiler.command, *flags, *link), folder)
            whole.replace(out)
        finally:
            whole.unlink(missing_ok=True)


def _run(command: Sequence[str], folder: str) -> subprocess.CompletedProcess[str]:
    """Without a user's cache folder zig keeps what it builds in `folder`."""
    environment = {**os.environ, "LC_ALL": "C"}
    if "ZIG_GLOBAL_CACHE_DIR" not in environment:
        cache = next(filter(_writable, cache_folders()), Path(folder))
        environment["ZIG_GLOBAL_CACHE_DIR"] = str(cache / "zig")
    environment.setdefault("ZIG_LOCAL_CACHE_DIR", environment["ZIG_GLOBAL_CACHE_DIR"])
    try:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=COMPILE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(list(command), 1, "", str(error))


def _must_run(command: Sequence[str], folder: str) -> None:
    done = _run(command, folder)
    if done.returncode == 0:
        return
    log.debug("%s\n%s", shlex.join(command), done.stderr)
    lines = done.stderr.splitlines()
    complaint = next((line for line in lines if "error" in line or "undefined" in line), lines[-1] if lines else "no message")
    raise ConfigError("CXX", command[0], f"the data plane does not compile: {complaint.strip()}")


# ---- the library of this machine


def cache_folders() -> Iterator[Path]:
    """Where a library may lie, in order of preference. The folders need not exist."""
    given, home = os.environ.get("XDG_CACHE_HOME", ""), os.environ.get("HOME", "")
    if os.path.isabs(given):
        yield Path(given, "helixrt", "native")
    elif os.path.isabs(home):
        yield Path(home, ".cache", "helixrt", "native")
    yield Path(tempfile.gettempdir(), f"helixrt-{os.getuid()}")


def _writable(folder: Path) -> bool:
    """Whether a library can be written there, and by no other user. Makes the folder."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return _ours(folder)
    except OSError:
        return False


def _ours(folder: Path) -> bool:
    """Whether only this user or root can have written what lies there: it is loaded into this process."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022 and not folder.is_symlink()


def shipped() -> Path | None:
    """The library that came with the package, unless the sources beside it are others."""
    path = FOLDER / LIBRARY
    if not path.is_file():
        return None
    if sources() and f"{_MARK}{digest_of_sources()}".encode() not in path.read_bytes():
        log.info("%s was made from other sources and is not used", path)
        return None
    return path


def library_path(sanitize: str = "") -> Path:
    """The library: the shipped one, one that was compiled before, or one that is compiled now.

    Raises ConfigError where there is no compiler, or the compiler refuses the sources.
    """
    if not sanitize and (found := shipped()) is not None:
        return found
    if not sources():
        raise ConfigError("helixrt.native", FOLDER, "holds neither a library nor its sources; install helixrt again")
    for compiler in compilers():
        if (found := _cached(_name(compiler, sanitize))) is not None:
            return found
    compiler = find_compiler(sanitize)
    name = _name(compiler, sanitize)
    folder = next(filter(_writable, cache_folders()), None) or Path(tempfile.mkdtemp(prefix="helixrt-"))
    with _alone(folder):
        if (found := _cached(name)) is None:
            began = time.monotonic()
            compile_library(found := folder / name, compiler, sanitize)
            took_s, command = time.monotonic() - began, shlex.join(compiler.command)
            log.info("compiled the data plane with %s in %.1f s: %s", command, took_s, found)
            _remove_old(folder)
    return found


def _name(compiler: Compiler, sanitize: str) -> str:
    kind = f"-{sanitize}" if sanitize else ""
    return f"libhelixrt_native{kind}-{_digest(compiler, sanitize)}.so"


def _cached(name: str) -> Path | None:
    return next((folder / name for folder in cache_folders() if _ours(folder) and (folder / name).is_file()), None)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process compiles into `folder` meanwhile; it is waited for, as long as one compilation may take.

    After that, and on a file system without locks, two may compile at once, which costs time alone.
    """
    with open(folder / "lock", "w") as file:
        deadline = time.monotonic() + COMPILE_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield


def _remove_old(folder: Path) -> None:
    for path in folder.glob("libhelixrt_native*.so"):
        try:
            if time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink()
        except OSError:
            pass  # another process has removed it


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m helixrt.native.build", description="Compile helixrt's data plane.")
    parser.add_argument("--sanitize", choices=SANITIZERS, default="", help="compile in a sanitizer, for tests")
    parser.add_argument("--out", type=Path, metavar="PATH", help="the library to write; by default in the user's cache folder")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if given.out is None:
            path = library_path(given.sanitize)
        else:
            compile_library(path := given.out, find_compiler(given.sanitize), given.sanitize)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
