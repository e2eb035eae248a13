// Results are those of torch but for cases in which torch's own vector loop and scalar loop differ: the payload and sign of a
// NaN; the minimum or maximum of 0.0 and -0.0 (here: the right operand); complex products, which its scalar loop fuses. NaN
// payloads aside, the bits depend neither on the instruction set nor on the alignment or the position of an element. A complex
// sum is added and divided part by part, as collectives do.
//
// Compile with -ffp-contract=off: where the processor's base set has fused multiply-add, g++ would use it in complex products.
#include "reduce.hpp"

#include <cstring>
#include <iterator>
#include <type_traits>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace hx {
using Kernel = void (*)(u8* into, const u8* left, const u8* right, std::size_t count, i64 divisor);
}

#define HX_SET base
#define HX_TARGET
#define HX_WIDTH 16
#if defined(__aarch64__)
#define HX_WIDEN(halves) vcvt_f32_f16(float16x4_t(halves))
#define HX_NARROW(floats) vcvt_f16_f32(float32x4_t(floats))
#endif
#include "reduce_kernels.hpp"

#if defined(__x86_64__)
#define HX_SET avx2
#define HX_TARGET __attribute__((target("avx2,f16c")))
#define HX_WIDTH 32
#define HX_WIDEN(halves) _mm256_cvtph_ps(__m128i(halves))
#define HX_NARROW(floats) _mm256_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT)
#include "reduce_kernels.hpp"

#define HX_SET avx512
#define HX_TARGET __attribute__((target("avx512f,avx512bw,avx512vl")))
#define HX_WIDTH 64
#define HX_WIDEN(halves) _mm512_maskz_cvtph_ps(0xffff, __m256i(halves))  // without a mask g++ 12 warns in its own header
#define HX_NARROW(floats) _mm512_maskz_cvtps_ph(0xffff, floats, _MM_FROUND_TO_NEAREST_INT)
#include "reduce_kernels.hpp"
#endif

namespace hx {
enum class InstructionSet : i32 { BASE, AVX2, AVX512 };

namespace {
// __builtin_cpu_supports is always 0 with some builds of clang, so the processor is asked here.
InstructionSet detect() {
#if defined(__x86_64__)
  u32 a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return InstructionSet::BASE;
  const bool saves = c & (1u << 27), f16c = c & (1u << 29);
  if (!saves || !f16c || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return InstructionSet::BASE;
  u32 state, high;  // the registers that the system keeps for a thread
  asm volatile("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
  constexpr u32 F = 1u << 16, BW = 1u << 30, VL = 1u << 31, AVX2 = 1u << 5;
  if ((state & 0xe6) == 0xe6 && (b & (F | BW | VL | AVX2)) == (F | BW | VL | AVX2)) return InstructionSet::AVX512;
  if ((state & 0x6) == 0x6 && (b & AVX2)) return InstructionSet::AVX2;
#endif
  return InstructionSet::BASE;
}

InstructionSet widest() {
  static const InstructionSet set = detect();
  return set;
}

Kernel find([[maybe_unused]] InstructionSet set, Dtype dtype, Operator op, bool divided) {
#if defined(__x86_64__)
  if (set == InstructionSet::AVX512) return avx512::find(dtype, op, divided);
  if (set == InstructionSet::AVX2) return avx2::find(dtype, op, divided);
#endif
  return base::find(dtype, op, divided);
}

template <class T>
void complex_product(u8* into, const u8* left, const u8* right, std::size_t count, i64 divisor) {
  for (std::size_t at = 0; at < count * 2 * sizeof(T); at += 2 * sizeof(T)) {
    T a[2], b[2];
    std::memcpy(a, left + at, sizeof a);
    std::memcpy(b, right + at, sizeof b);
    const T by = static_cast<T>(divisor), product[2] = {(a[0] * b[0] - a[1] * b[1]) / by, (a[0] * b[1] + a[1] * b[0]) / by};
    std::memcpy(into + at, product, sizeof product);
  }
}

// A reduction in terms of those that have kernels: `times` elements of `dtype` for each of the user's.
struct Work {
  Dtype dtype;
  Operator op;
  std::size_t times = 1;
};

Work canonical(Dtype dtype, Operator op) {
  using enum Operator;
  const bool bitwise = op == AND || op == OR || op == XOR, wraps = op == SUM || op == PRODUCT;
  switch (dtype) {
    case Dtype::I8: if (wraps) dtype = Dtype::U8; break;
    case Dtype::I16: if (wraps) dtype = Dtype::U16; break;
    case Dtype::I32: if (wraps) dtype = Dtype::U32; break;
    case Dtype::I64: if (wraps) dtype = Dtype::U64; break;
    case Dtype::BOOL: return {dtype, op == SUM || op == MAX ? OR : op == PRODUCT || op == MIN ? AND : op};
    case Dtype::C64: if (op == SUM) return {Dtype::F32, op, 2}; break;
    case Dtype::C128: if (op == SUM) return {Dtype::F64, op, 2}; break;
    default: break;
  }
  const bool integer = dtype < Dtype::BOOL;
  return integer && bitwise ? Work{Dtype::U8, op, std::size_t(element_bytes(dtype))} : Work{dtype, op};
}

Kernel kernel(InstructionSet set, const Work& work, bool divided) {
  if (work.dtype == Dtype::C64 && work.op == Operator::PRODUCT) return complex_product<float>;
  if (work.dtype == Dtype::C128 && work.op == Operator::PRODUCT) return complex_product<double>;
  return find(set, work.dtype, work.op, divided);
}
}  // namespace

int element_bytes(Dtype dtype) {
  constexpr int bytes[] = {1, 1, 2, 4, 8, 2, 4, 8, 1, 2, 2, 4, 8, 8, 16};
  static_assert(std::size(bytes) == std::size_t(Dtype::DTYPES));
  return bytes[int(dtype)];
}

bool can_reduce(Dtype dtype, Operator op) { return kernel(InstructionSet::BASE, canonical(dtype, op), false) != nullptr; }

// Not in the header: `apply` and the tests of each set call it.
void apply_with(InstructionSet set, const Reduction& reduction, void* into, const void* left, const void* right,
                std::size_t count, bool last) {
  const Work work = canonical(reduction.dtype, reduction.op);
  const i64 divisor = last ? reduction.divisor : 1;
  const Kernel run = kernel(set, work, divisor != 1);
  run(static_cast<u8*>(into), static_cast<const u8*>(left), static_cast<const u8*>(right), count * work.times, divisor);
}

void Reduction::apply(void* into, const void* left, const void* right, std::size_t count, bool last) const {
  apply_with(widest(), *this, into, left, right, count, last);
}

const char* instruction_set() {
  constexpr const char* names[] = {"base", "AVX2", "AVX-512"};
  return names[int(widest())];
}
}  // namespace hx
