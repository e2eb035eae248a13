"""Reduce-copy and copy give the oracle's bits and touch nothing else: on the host, in Triton's interpreter, on a card.

One list of cases for all three. Outputs are filled with NaN (integers: a pattern) and have guard zones around them.
The interpreter must be chosen before Triton is imported, so its cases run in one process of their own.
"""

from __future__ import annotations

import multiprocessing
import queue
import re
import subprocess
import sys
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helixrt.errors import MissingExtra
from helixrt.triton_kernels import reduction
from helixrt.triton_kernels.oracle import ACCUMULATORS, BITWISE, Op, reduced

GUARD = 64  # elements before and behind every tensor
SMALL_TILE = 32  # vectors in the tile of the launch that most cases use; see `kernels.Launch`
FLOATS = [dtype for dtype in ACCUMULATORS if dtype.is_floating_point]


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    length: int
    op: Op | None = Op.SUM  # None: copy
    divisor: int = 1
    two: bool = False  # a second destination
    shifts: tuple[int, int, int, int] = (0, 0, 0, 0)  # elements by which left, right, out, also miss a boundary
    out_is: str = ""  # "left" or "right": in place
    programs: int = 2
    whole: bool = False  # the launch that users get, not the small one

    def __str__(self) -> str:
        what = self.op.value if self.op else "copy"
        shifted = "".join(map(str, self.shifts)) if any(self.shifts) else ""
        parts = (f"by{self.divisor}" * (self.divisor > 1), "two" * self.two, shifted, self.out_is, "whole" * self.whole)
        return "-".join(filter(None, (str(self.dtype)[6:], what, str(self.length), *parts, f"p{self.programs}")))


def cases() -> list[Case]:
    found = []
    for number, dtype in enumerate(ACCUMULATORS):
        tile = SMALL_TILE * 16 // dtype.itemsize
        for op in Op:
            if not (op in BITWISE and dtype.is_floating_point):
                found.append(Case(dtype, 2 * tile + 3 + number, op, two=op is Op.SUM, programs=1 + number % 3))
        found += [Case(dtype, tile + 5, None, two=number % 2 == 0, shifts=(1, 1, 1, 1), programs=3)]
        if dtype.is_floating_point:
            found += [Case(dtype, 3 * tile + 1, divisor=3, two=two) for two in (False, True)]
    for dtype in (torch.float32, torch.bfloat16):
        tile = SMALL_TILE * 16 // dtype.itemsize
        for length in (1, 2, 7, tile - 1, tile, tile + 1, 5 * tile + 7):
            for shifts in ((0, 0, 0, 0), (1, 1, 1, 1), (3, 3, 3, 3), (0, 1, 2, 3)):
                found.append(Case(dtype, length, two=length % 2 == 1, shifts=shifts))
        for where in ("left", "right"):
            found += [Case(dtype, 3 * tile + 2, out_is=where, two=two, shifts=(1, 1, 1, 1), divisor=5) for two in (False, True)]
        found += [Case(dtype, 40_000, two=True, whole=True), Case(dtype, 2 * tile, programs=9)]
    return found


CASES = {str(case): case for case in cases()}


def elements(case: Case, seed: int) -> torch.Tensor:
    """Values of both signs, some special, in the first tiles and the last elements."""
    generator = torch.Generator().manual_seed(seed)
    if case.dtype == torch.bool:
        return torch.rand(case.length, generator=generator) < 0.5
    if not case.dtype.is_floating_point:
        info = torch.iinfo(case.dtype)
        return torch.randint(info.min, info.max, (case.length,), dtype=case.dtype, generator=generator)
    values = torch.randn(case.length, generator=generator, dtype=torch.float64).to(case.dtype)
    info = torch.finfo(case.dtype)
    least = 2.0**-60 if case.dtype == torch.bfloat16 else info.tiny  # the interpreter gets small bfloat16 wrong
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, info.max, info.min, least, 1.0])
    some = torch.rand(case.length, generator=generator) < 0.3
    picked = special.to(torch.float64)[torch.randint(len(special), (case.length,), generator=generator)].to(case.dtype)
    return torch.where(some, picked, values)


def wanted_of(case: Case, left: torch.Tensor, right: torch.Tensor, how: str) -> torch.Tensor:
    if case.op is None:
        return left
    if how == "interpreter" and case.dtype == torch.bfloat16:  # it rounds towards zero, where compiled code rounds to even
        wide = reduced(left.float(), right.float(), case.op, case.divisor)
        return (wide.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return reduced(left, right, case.op, case.divisor)


class Guarded:
    """A tensor in the middle of memory filled with NaN, or with a pattern."""

    def __init__(self, case: Case, shift: int, device: str, values: torch.Tensor | None = None) -> None:
        fill = float("nan") if case.dtype.is_floating_point else True if case.dtype == torch.bool else 77
        self.memory = torch.full((case.length + 2 * GUARD + shift,), fill, dtype=case.dtype, device=device)
        self.tensor = self.memory[GUARD + shift : GUARD + shift + case.length]
        if values is not None:
            self.tensor.copy_(values)
        self.before = self.memory.clone()

    def check(self, wanted: torch.Tensor, where: str) -> None:
        expected = self.before.cpu()
        begin = self.tensor.storage_offset()
        expected[begin : begin + len(wanted)] = wanted
        torch.testing.assert_close(self.memory.cpu(), expected, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{where}: {m}")


def check_case(name: str, how: str) -> None:
    """Run a case on the "host", by the kernels on host tensors ("interpreter"), or on "cuda"."""
    case, seed = CASES[name], zlib.crc32(name.encode())
    device = "cuda" if how == "cuda" else "cpu"
    given = [elements(case, seed), elements(case, seed + 1)]
    left, right = (Guarded(case, shift, device, values) for shift, values in zip(case.shifts, given, strict=False))
    out = {"left": left, "right": right}.get(case.out_is) or Guarded(case, case.shifts[2], device)
    also = Guarded(case, case.shifts[3], device) if case.two else None
    outs = (out.tensor, also.tensor if also is not None else None)
    wanted = wanted_of(case, *given, how)
    if how == "host":
        if case.op is None:
            reduction.copy(left.tensor, *outs)
        else:
            reduction.reduce_copy(left.tensor, right.tensor, *outs, op=case.op, divisor=case.divisor)
    else:
        from helixrt.triton_kernels import kernels

        launch = kernels.Launch(case.programs) if case.whole else kernels.Launch(case.programs, warps=1, vectors=1)
        if case.op is None:
            kernels.launch_copy(left.tensor, *outs, launch)
        else:
            kernels.launch_reduce_copy(left.tensor, right.tensor, *outs, case.op, case.divisor, launch)
    for memory, where in ((out, "out"), (also, "also")):
        if memory is not None:
            memory.check(wanted, where)
    for memory, values, where in ((left, given[0], "left"), (right, given[1], "right")):
        if memory is not out:
            memory.check(values, where)


# ---------------------------------------------------------------- in the three places


@pytest.mark.parametrize("name", CASES)
def test_on_the_host(name: str) -> None:
    check_case(name, "host")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_card(name: str) -> None:
    check_case(name, "cuda")


def interpret(names: list[str], said: Any) -> None:
    import numpy

    torch.set_num_threads(1)
    numpy.seterr(all="ignore")  # special values are on purpose
    for name in names:
        try:
            check_case(name, "interpreter")
            said.put((name, ""))
        except BaseException:
            said.put((name, traceback.format_exc()))


@pytest.fixture(scope="module")
def interpreted() -> Iterator[dict[str, str]]:
    """Name of a case -> what went wrong with it in Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed here")
    context, answers = multiprocessing.get_context("spawn"), {}
    said = context.Queue()
    process = context.Process(target=interpret, args=(list(CASES), said), name="interpreter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        process.start()
    try:
        for _ in CASES:
            name, problem = said.get(timeout=200)  # it imports Triton first
            answers[name] = problem
    except queue.Empty:
        pass
    finally:
        process.kill()
        process.join()
    yield answers


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter(name: str, interpreted: dict[str, str]) -> None:
    assert name in interpreted, "the interpreter's process ended before this case"
    assert not interpreted[name], interpreted[name]


# ---------------------------------------------------------------- blocks and bytes on the host


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_many_blocks_on_the_host(dtype: torch.dtype) -> None:
    case = Case(dtype, 3 * reduction._WIDE_BLOCK + 5, two=True)
    given = [elements(case, 1), elements(case, 2)]
    out, also = Guarded(case, 1, "cpu"), Guarded(case, 0, "cpu")
    for divisor in (1, 3) if dtype.is_floating_point else (1,):
        reduction.reduce_copy(*given, out.tensor, also.tensor, divisor=divisor)
        for memory in (out, also):
            memory.check(reduced(*given, Op.SUM, divisor), f"divided by {divisor}")
    out, also = Guarded(case, 1, "cpu"), Guarded(case, 0, "cpu")
    reduction.copy(given[0], out.tensor, also.tensor)
    for memory in (out, also):
        memory.check(given[0], "copy")


def test_a_mean_of_halves_does_not_overflow_on_its_way() -> None:
    large = torch.full((9,), 60_000.0, dtype=torch.float16)
    out = torch.zeros_like(large)
    reduction.reduce_copy(large, large, out, divisor=2)
    assert torch.equal(out, large)


def test_shapes_and_gradients_do_not_matter() -> None:
    left, right = torch.randn(3, 5, requires_grad=True), torch.randn(15)
    out = torch.nn.Parameter(torch.zeros(5, 3))
    reduction.reduce_copy(left, right, out)
    assert torch.equal(out.detach().view(-1), left.detach().view(-1) + right)
    reduction.copy(torch.randn(0, 4), torch.empty(0))
    reduction.reduce_copy(torch.empty(0), torch.empty(0, 2), torch.empty(0))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16], ids=str)
def test_every_type_can_be_copied(dtype: torch.dtype) -> None:
    source = torch.randint(256, (3 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    out, also = torch.zeros_like(source), torch.zeros_like(source)
    reduction.copy(source, out, also)
    for each in (out, also):
        assert torch.equal(each.view(torch.uint8), source.view(torch.uint8))


# ---------------------------------------------------------------- what is refused


def test_what_does_not_fit_together_is_one_error() -> None:
    a = torch.arange(8.0)
    for wrong in (a[:7], a.double(), torch.arange(16.0)[::2]):
        for given in ((wrong, a, a), (a, wrong, a), (a, a, wrong), (a, a, a, wrong)):
            with pytest.raises(ValueError, match="contiguous and of one length and type, got torch.float"):
                reduction.reduce_copy(*given)
        with pytest.raises(ValueError, match="contiguous and of one length"):
            reduction.copy(a, wrong)
    with pytest.raises(ValueError, match="on one device, or on one card and in pinned memory, got .* on meta"):
        reduction.reduce_copy(a, torch.empty(8, device="meta"), torch.empty(8))


def test_destinations_may_be_a_source_but_not_overlap() -> None:
    memory = torch.arange(12.0)
    a, shifted, other = memory[:8], memory[2:10], torch.ones(8)
    for given in ((a, other, shifted), (other, a, shifted), (other, other, a, shifted), (other, other, a, a)):
        with pytest.raises(ValueError, match="a destination overlaps another tensor"):
            reduction.reduce_copy(*given)
    with pytest.raises(ValueError, match="a destination overlaps"):
        reduction.copy(a, shifted)
    assert torch.equal(memory, torch.arange(12.0)), "nothing was written"
    reduction.reduce_copy(a[:4], memory[4:8], memory[8:], a[:4])
    assert torch.equal(memory[8:], torch.tensor([4.0, 6.0, 8.0, 10.0])) and torch.equal(memory[:4], memory[8:])


def test_what_has_no_meaning_is_refused() -> None:
    ints, floats = torch.arange(4), torch.arange(4.0)
    with pytest.raises(ValueError, match="a mean is a sum of floats"):
        reduction.reduce_copy(ints, ints, ints.clone(), divisor=2)
    with pytest.raises(ValueError, match="a mean is a sum of floats"):
        reduction.reduce_copy(floats, floats, floats.clone(), op=Op.MAX, divisor=2)
    with pytest.raises(ValueError, match="cannot divide sum of torch.float32 by 0"):
        reduction.reduce_copy(floats, floats, floats.clone(), divisor=0)
    with pytest.raises(ValueError, match="by xor: it needs integers"):
        reduction.reduce_copy(floats, floats, floats.clone(), op=Op.XOR)
    with pytest.raises(ValueError, match="cannot reduce torch.complex64"):
        reduction.reduce_copy(*(torch.zeros(4, dtype=torch.complex64) for _ in range(3)))


def test_triton_is_asked_for_only_by_a_cuda_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    from helixrt import triton_kernels

    monkeypatch.delattr(triton_kernels, "kernels", raising=False)
    monkeypatch.delitem(sys.modules, "helixrt.triton_kernels.kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)  # as where it is not installed
    a = torch.ones(4)
    reduction.reduce_copy(a, a, a)
    assert a.tolist() == [2.0] * 4
    monkeypatch.setattr(reduction, "_card", lambda *tensors: torch.device("cuda", 0))
    for attempt in (lambda: reduction.reduce_copy(a, a, a), lambda: reduction.copy(a, a)):
        with pytest.raises(MissingExtra, match=r"needs the package 'triton'.*helixrt\[gpu\]"):
            attempt()


# ---------------------------------------------------------------- what only a card, or its compiler, can show


@pytest.mark.parametrize("name", ["float32-sum", "bfloat16-mean", "int8-copy"])
def test_the_main_loop_moves_16_bytes_per_instruction(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for an H100 without one: full tiles are moved by vectors, whatever the length, and nothing is spilled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pytest.importorskip("triton", reason="Triton is not installed here")
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from helixrt.triton_kernels import kernels

    launch = kernels.DEFAULT
    pointer, constants = {
        "float32-sum": ("*fp32", {"OP": "sum", "WIDE": tl.float32, "DIVIDE": False, "TILE": launch.tile(4)}),
        "bfloat16-mean": ("*bf16", {"OP": "sum", "WIDE": tl.float32, "DIVIDE": True, "TILE": launch.tile(2)}),
        "int8-copy": ("*i8", {"OP": "copy", "WIDE": tl.int64, "DIVIDE": False, "TILE": launch.tile(1)}),
    }[name]
    kernel = kernels.reduce_copy_kernel
    itemsize = launch.tile(1) // constants["TILE"]
    constants |= {"TWO": True, "PIECE": launch.piece(itemsize), "VECTOR": kernels.VECTOR_BYTES}
    kinds = dict.fromkeys(("left", "right", "out", "also"), pointer) | {
        "length": "i64",
        "head": "i32",
        "divisor": "i32",
    }
    signature = {each: "constexpr" if each in constants else kinds[each] for each in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, each in enumerate(signature.values()) if each.startswith("*")}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": launch.warps})
    ptx = compiled.asm["ptx"]
    inputs = 1 if constants["OP"] == "copy" else 2
    assert ptx.count("ld.global.v4.b32") == inputs * launch.vectors
    assert ptx.count("st.global.v4.b32") == 2 * launch.vectors
    written = tmp_path / "kernel.ptx"
    written.write_text(ptx)
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    architecture = re.findall(r"\.target (\w+)", ptx)[0]
    command = [assembler, "-v", f"--gpu-name={architecture}", written, "-o", tmp_path / "kernel.cubin"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in told, told


@pytest.mark.gpu
def test_positions_beyond_31_bits() -> None:
    length = (1 << 31) + 12_345
    left = torch.zeros(length, dtype=torch.uint8, device="cuda")
    left[-1], left[1 << 31] = 3, 5
    out = torch.full_like(left, 9)
    reduction.reduce_copy(left, left, out, programs=64)
    assert out[-1] == 6 and out[1 << 31] == 10 and out.sum(dtype=torch.int64) == 16
    reduction.copy(left, out, programs=64)
    assert torch.equal(out, left)


@pytest.mark.gpu
def test_pinned_memory_stands_beside_the_card() -> None:
    left = torch.randn(100_001, device="cuda")
    right, also = torch.randn(100_001).pin_memory(), torch.full((100_001,), float("nan")).pin_memory()
    out = torch.full_like(left, float("nan"))
    reduction.reduce_copy(left, right, out, also)
    torch.cuda.current_stream().synchronize()
    assert torch.equal(out.cpu(), left.cpu() + right) and torch.equal(also, out.cpu())
    with pytest.raises(ValueError, match="on one card and in pinned memory"):
        reduction.reduce_copy(left, torch.randn(100_001), out)


@pytest.mark.gpu
def test_the_dispatch_of_a_card_gives_the_hosts_bits() -> None:
    for dtype in FLOATS:
        case = replace(Case(dtype, 70_001), divisor=3)
        given = [elements(case, 3), elements(case, 4)]
        out, also = Guarded(case, 1, "cuda"), Guarded(case, 1, "cuda")
        reduction.reduce_copy(given[0].cuda(), given[1].cuda(), out.tensor, also.tensor, divisor=3)
        for memory in (out, also):
            memory.check(reduced(*given, Op.SUM, 3), str(dtype))
