"""What ctypes is told is what the headers say; a library that does not fit is refused in one line."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from enum import IntEnum
from pathlib import Path

import pytest

from helixrt.errors import ConfigError
from helixrt.native import build, flat, library

HEADER = re.sub(r"/\*.*?\*/", "", (build.FOLDER / "include" / "helixrt_native.h").read_text(), flags=re.DOTALL)
STRUCTURES = {
    "hx_options": library.COptions,
    "hx_call": library.CCall,
    "hx_event": library.CEvent,
    "hx_rail_counters": library.CRailCounters,
    "hx_loop_counters": library.CLoopCounters,
}
TYPES: dict[str, type | None] = {
    "void": None,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "const char *": ctypes.c_char_p,
    "char *": ctypes.c_char_p,
    "void *": ctypes.c_void_p,
    "const void *": ctypes.c_void_p,
    "hx_engine *": ctypes.c_void_p,
    "const int32_t *": ctypes.POINTER(ctypes.c_int32),
    "const int64_t *": ctypes.POINTER(ctypes.c_int64),
    **{f"{const}{name} *": ctypes.POINTER(kind) for name, kind in STRUCTURES.items() for const in ("", "const ")},
}


def kind_of(declaration: str) -> type | None:
    """Of `const char *name`, `int32_t name`."""
    found = re.fullmatch(r"(.*?[\s*])\w+", declaration.strip(), re.DOTALL)
    assert found, declaration
    return TYPES[re.sub(r"\s*\*", " *", " ".join(found[1].split()))]


def enumerators(file: str, name: str) -> dict[str, int]:
    text = re.sub(r"//.*", "", (build.FOLDER / "src" / file).read_text())
    found = re.search(rf"enum (?:class )?{name} : \w+ \{{(.*?)\}}", text, re.DOTALL)
    assert found, name
    values: dict[str, int] = {}
    for entry in filter(None, map(str.strip, found[1].split(","))):
        key, _, value = entry.partition("=")
        values[key.strip()] = int(value) if value else len(values)
    return values


def test_functions_are_those_of_the_header() -> None:
    found = re.findall(r"^([\w ]+[ *])(hx_\w+)\(([^)]*)\);", HEADER, re.MULTILINE)
    assert {name for _, name, _ in found} == set(library.FUNCTIONS)
    for result, name, parameters in found:
        kinds = () if parameters == "void" else tuple(map(kind_of, parameters.split(",")))
        assert library.FUNCTIONS[name] == (kind_of(result + name), kinds), name


def test_structures_are_those_of_the_header() -> None:
    found = re.findall(r"typedef struct \{(.*?)\} (\w+);", HEADER, re.DOTALL)
    assert {name for _, name in found} == set(STRUCTURES)
    for body, name in found:
        fields: list[tuple[str, object]] = []
        for line in filter(None, map(str.strip, body.split(";"))):
            kind, names = line.split(maxsplit=1)
            for each in map(str.strip, names.split(",")):
                if array := re.fullmatch(r"(\w+)\[(\d+)\]", each):
                    assert kind == "char"
                    fields.append((array[1], ctypes.c_char * int(array[2])))
                else:
                    pointer = each.startswith("*")
                    fields.append((each.lstrip("*"), TYPES[f"{kind} *" if pointer else kind]))
        assert [tuple(field) for field in STRUCTURES[name]._fields_] == fields, name


@pytest.mark.parametrize(
    ("ours", "file", "name"),
    [
        (library.Status, "types.hpp", "Status"),
        (library.End, "types.hpp", "End"),
        (library.Failure, "types.hpp", "Failure"),
        (library.EventKind, "io.hpp", "Event"),
        (library.Dtype, "reduce.hpp", "Dtype"),
        (library.Operator, "reduce.hpp", "Operator"),
    ],
)
def test_numbers_are_those_of_the_sources(ours: type[IntEnum], file: str, name: str) -> None:
    theirs = enumerators(file, name)
    theirs.pop(f"{name.upper()}S", None)  # how many there are
    assert {each.name: each.value for each in ours} == theirs


def test_the_flat_form_is_that_of_the_sources() -> None:
    assert enumerators("plan.hpp", "NodeKind") == {name: getattr(flat, name) for name in ("SEND", "RECEIVE", "REDUCE", "COPY")}
    assert enumerators("plan.hpp", "NodeFlag") == {name: getattr(flat, name) for name in ("LAST", "ON_ARRIVAL", "TWICE")}
    assert f"FIELDS = {flat.FIELDS};" in (build.FOLDER / "src" / "plan.hpp").read_text()


def test_the_number_of_the_abi() -> None:
    assert re.search(rf"#define HX_ABI {library.ABI}\b", HEADER)


@pytest.mark.system
def test_another_abi_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" int hx_abi() { return 99; }\n')
    build.compile_library(tmp_path / "other.so", build.find_compiler(), files=[source])
    with pytest.raises(ConfigError, match="has ABI 99, and this helixrt needs 1; install helixrt again"):
        library.load(tmp_path / "other.so")


def test_what_is_no_library_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library\n")
    with pytest.raises(ConfigError, match="cannot be loaded") as raised:
        library.load(tmp_path / "text.so")
    assert "\n" not in str(raised.value)


@pytest.mark.system
def test_importing_compiles_and_loads_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, helixrt, helixrt.native.engine\n"
        "from helixrt.native.library import library\n"
        "assert library.cache_info().currsize == 0 and 'torch' not in sys.modules"
    )
    environment = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=100)
    assert not list(tmp_path.iterdir())
