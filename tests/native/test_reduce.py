"""Native reductions against torch: every type, operator and instruction set, bit for bit.

The library is built here from reduce.cpp alone, with functions that force an instruction set.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from helixrt.triton_kernels.oracle import BITWISE, OPERATORS, Op, reduced

COMPILER = os.environ.get("CXX") or shutil.which("c++")
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine (c++, or CXX)"),
]

SOURCES = Path(__file__).parents[2] / "helixrt" / "native" / "src"
SETS = ("base", "avx2", "avx512", "lanes64")  # the last: the loops of AVX-512 without its instructions
DTYPES = (  # in the order of reduce.hpp
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
OPS = (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.AND, Op.OR, Op.XOR)  # in the order of reduce.hpp
LIKE_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LONG = 100_003
GUARD = 64  # bytes before and after the destination that must stay as they are

WRAPPER = """
#include "reduce.cpp"
#define HX_SET lanes64
#define HX_TARGET
#define HX_WIDTH 64
#include "reduce_kernels.hpp"

extern "C" {
int has_set(int set) { return set == 3 || set <= int(hx::widest()); }
int element_bytes(int dtype) { return hx::element_bytes(hx::Dtype(dtype)); }
int can_reduce(int dtype, int op) { return hx::can_reduce(hx::Dtype(dtype), hx::Operator(op)); }
const char* instruction_set() { return hx::instruction_set(); }
void reduce(int set, int dtype, int op, long long divisor, void* into, const void* left, const void* right, long long count,
            int last) {
  const hx::Reduction reduction{hx::Dtype(dtype), hx::Operator(op), divisor};
  if (set < 0) return reduction.apply(into, left, right, count, last);
  if (set < 3) return hx::apply_with(hx::InstructionSet(set), reduction, into, left, right, count, last);
  const hx::Work work = hx::canonical(reduction.dtype, reduction.op);
  const long long by = last ? divisor : 1;
  const hx::Kernel kernel = hx::lanes64::find(work.dtype, work.op, by != 1);
  if (kernel == nullptr) return reduction.apply(into, left, right, count, last);  // it has no vectors
  const auto *a = static_cast<const hx::u8*>(left), *b = static_cast<const hx::u8*>(right);
  kernel(static_cast<hx::u8*>(into), a, b, count * work.times, by);
}
}
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("native_reduce")
    source, binary = folder / "test_reduce.cpp", folder / "test_reduce.so"
    source.write_text(WRAPPER)
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-fPIC", "-shared"]
    command = [*str(COMPILER).split(), *flags, f"-I{SOURCES}", str(source), "-o", str(binary)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    found = ctypes.CDLL(str(binary))
    found.instruction_set.restype = ctypes.c_char_p
    found.reduce.restype = None
    integer, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_longlong
    found.reduce.argtypes = [integer, integer, integer, size, pointer, pointer, pointer, size, integer]
    return found


@dataclass(frozen=True)
class Native:
    library: ctypes.CDLL
    number: int  # of the instruction set in SETS; -1: as the product chooses

    def reduce(self, into: int, left: int, right: int, count: int, of: tuple[torch.dtype, Op, int], last: bool) -> None:
        """The arguments are addresses and a number of elements."""
        dtype, op, divisor = of
        self.library.reduce(self.number, DTYPES.index(dtype), OPS.index(op), divisor, into, left, right, count, last)

    def of(self, left: torch.Tensor, right: torch.Tensor, op: Op, divisor: int = 1) -> torch.Tensor:
        out = torch.empty_like(left)
        self.reduce(out.data_ptr(), left.data_ptr(), right.data_ptr(), left.numel(), (left.dtype, op, divisor), True)
        return out


@pytest.fixture(params=SETS)
def native(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Native:
    number = SETS.index(request.param)
    if not library.has_set(number):
        pytest.skip(f"this processor has no {request.param}")
    return Native(library, number)


# ---------------------------------------------------------------- operands and what torch gives


def allowed(dtype: torch.dtype, op: Op) -> bool:
    if dtype.is_complex:
        return op in (Op.SUM, Op.PRODUCT)
    return op not in BITWISE or not dtype.is_floating_point


CASES = [(dtype, op) for dtype in DTYPES for op in OPS if allowed(dtype, op)]


def operand(dtype: torch.dtype, count: int, generator: np.random.Generator) -> torch.Tensor:
    """Random elements: all bit patterns (so infinities, NaN and subnormals), numbers of like size, and special values."""
    raw = torch.from_numpy(generator.integers(0, 256, count * dtype.itemsize, dtype=np.uint8))
    if dtype is torch.bool:
        return raw % 2 == 0
    wild = raw.view(dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return wild
    if dtype.is_complex:
        return torch.view_as_complex(operand(dtype.to_real(), 2 * count, generator).view(-1, 2))
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps  # the smallest subnormal number
    values = [0.0, -0.0, np.inf, -np.inf, np.nan, info.max, info.min, info.smallest_normal, least, -least, 1.0, 1.0 + info.eps]
    special = torch.tensor(values, dtype=torch.float64).to(dtype)[torch.from_numpy(generator.integers(0, len(values), count))]
    tame = torch.from_numpy(generator.standard_normal(count) * 2.0 ** generator.integers(-9, 9, count)).to(dtype)
    small = tame * torch.tensor(info.smallest_normal, dtype=dtype)
    kind = torch.from_numpy(generator.choice(5, count, p=[0.15, 0.5, 0.15, 0.1, 0.1]))
    return torch.stack([wild, tame, special, small, -tame])[kind, torch.arange(count)].contiguous()


def expected(left: torch.Tensor, right: torch.Tensor, op: Op, divisor: int) -> torch.Tensor:
    if left.dtype in LIKE_SIGNED:
        if op in (Op.MIN, Op.MAX):
            pick = np.minimum if op is Op.MIN else np.maximum
            return torch.from_numpy(pick(left.numpy(), right.numpy()))
        signed = LIKE_SIGNED[left.dtype]
        return reduced(left.view(signed), right.view(signed), op).view(left.dtype)
    if not left.dtype.is_complex:
        return reduced(left, right, op, divisor)
    if op is Op.SUM:  # part by part, as collectives do: torch.add multiplies by a complex 1, which spreads NaN
        return torch.view_as_complex(reduced(torch.view_as_real(left), torch.view_as_real(right), op, divisor))
    # The last elements go through a scalar loop of torch's that fuses multiply and add; its vector loop does not.
    padded = (torch.cat([each, torch.zeros(64, dtype=each.dtype)]) for each in (left, right))
    product = torch.view_as_real(torch.mul(*padded)[: len(left)])
    return torch.view_as_complex(product / divisor if divisor != 1 else product)


def parts(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor).flatten() if tensor.dtype.is_complex else tensor


def check(got: torch.Tensor, want: torch.Tensor, op: Op, left: torch.Tensor, right: torch.Tensor) -> None:
    """The bits are the same; any NaN is NaN, and any zero is the minimum or maximum of two zeros."""
    got, want, left, right = (parts(each) for each in (got, want, left, right))
    bits = BITS[got.dtype.itemsize]
    same = got.view(bits) == want.view(bits)
    if got.dtype.is_floating_point:
        same |= got.isnan() & want.isnan()
        if op in (Op.MIN, Op.MAX):
            same |= (got == 0) & (want == 0)
    wrong = (~same).nonzero().flatten()
    if len(wrong):
        at = int(wrong[0])
        raise AssertionError(f"{len(wrong)} differ, first {at}: {left[at]}, {right[at]} gave {got[at]}, not {want[at]}")


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=str)
def test_any_length_alignment_and_destination(native: Native, dtype: torch.dtype, op: Op) -> None:
    generator = np.random.default_rng(CASES.index((dtype, op)))
    left, right = operand(dtype, LONG, generator), operand(dtype, LONG, generator)
    size = dtype.itemsize
    for divisor in (1, 3, 4, 1_000_003) if dtype.is_floating_point or dtype.is_complex else (1,):
        for last in (False, True):
            want = expected(left, right, op, divisor if last else 1)
            for count in (*range(68), LONG):
                start = int(generator.integers(0, LONG - count + 1))
                part = slice(start, start + count)
                into_which = int(generator.integers(0, 3))  # left, right, or neither
                memory = []
                for source in (left[part], right[part], torch.zeros_like(left[part])):
                    offset = GUARD + int(generator.integers(0, 64))
                    buffer = torch.full((offset + count * size + GUARD,), 0xA5, dtype=torch.uint8)
                    buffer[offset : offset + count * size] = source.contiguous().view(torch.uint8)
                    memory.append((buffer, offset))
                into, a, b = (buffer.data_ptr() + offset for buffer, offset in (memory[into_which], *memory[:2]))
                native.reduce(into, a, b, count, (dtype, op, divisor), last)
                for number, (buffer, offset) in enumerate(memory):
                    got = buffer[offset : offset + count * size].clone().view(dtype)
                    if number == into_which:
                        check(got, want[part], op, left[part], right[part])
                    elif number < 2:
                        assert torch.equal(got.view(torch.uint8), (left, right)[number][part].contiguous().view(torch.uint8))
                    outside = torch.cat([buffer[:offset], buffer[offset + count * size :]])
                    assert bool((outside == 0xA5).all()), f"wrote outside of {count} elements"


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_number_is_read_and_rounded(native: Native, dtype: torch.dtype, flush: bool) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    if flush and dtype is torch.bfloat16:
        every = every[(every == 0) | ~(every.abs() < torch.finfo(dtype).smallest_normal)]  # its subnormals are those of float32
    minus_zero = torch.full_like(every, -0.0)
    scale = torch.full_like(every, 2.0**-13 if dtype is torch.float16 else 3.0)
    want = expected(every, scale, Op.PRODUCT, 1)
    try:
        if not torch.set_flush_denormal(flush):
            pytest.skip("this processor cannot flush subnormal numbers")
        got, same = native.of(every, scale, Op.PRODUCT), native.of(every, minus_zero, Op.SUM)
    finally:
        torch.set_flush_denormal(False)
    check(got, want, Op.PRODUCT, every, scale)
    check(same, every, Op.SUM, every, minus_zero)


@pytest.mark.parametrize("dtype", [each for each in DTYPES if each.is_floating_point], ids=str)
def test_of_two_zeros_the_right_one_is_chosen_at_every_position(native: Native, dtype: torch.dtype) -> None:
    left = torch.tensor([0.0, -0.0], dtype=dtype).repeat(40)[:77].contiguous()
    for op in (Op.MIN, Op.MAX):
        assert torch.equal(native.of(left, -left, op).signbit(), (-left).signbit())


def test_bytes_above_one_are_true(native: Native) -> None:
    left, right = (torch.arange(256, dtype=torch.uint8).repeat_interleave(n)[:256] for n in (1, 7))
    for op in OPS:
        got = native.of(left.view(torch.bool), right.view(torch.bool), op).view(torch.uint8)
        assert torch.equal(got, OPERATORS[op](left != 0, right != 0).to(torch.uint8)), op


def test_the_product_takes_the_widest_set(library: ctypes.CDLL) -> None:
    left, right = torch.randn(1001), torch.randn(1001)
    assert torch.equal(Native(library, -1).of(left, right, Op.SUM, 3), (left + right) / 3)
    names = {"base": 0, "AVX2": 1, "AVX-512": 2}
    widest = names[library.instruction_set().decode()]
    assert [bool(library.has_set(number)) for number in range(3)] == [number <= widest for number in range(3)]


def test_what_torch_knows_by_capability(library: ctypes.CDLL) -> None:
    at_least = {"AVX2": ("AVX2", "AVX-512"), "AVX512": ("AVX-512",)}.get(torch.backends.cpu.get_cpu_capability())
    if at_least is None:
        pytest.skip("torch sees no AVX2 on this processor")
    assert library.instruction_set().decode() in at_least


def test_sizes_and_what_can_be_reduced(library: ctypes.CDLL) -> None:
    assert [library.element_bytes(number) for number in range(len(DTYPES))] == [dtype.itemsize for dtype in DTYPES]
    for number, dtype in enumerate(DTYPES):
        signed = torch.zeros(1, dtype=LIKE_SIGNED.get(dtype, dtype))  # torch lacks some of unsigned integers
        for which, op in enumerate(OPS):
            try:
                OPERATORS[op](signed, signed)
                known = True
            except RuntimeError:
                known = False
            assert bool(library.can_reduce(number, which)) == known == allowed(dtype, op), (dtype, op)
