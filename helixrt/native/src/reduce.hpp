// The arithmetic of collectives on the CPU. Results are bit for bit those of torch on the same operands: sums of 16-bit floating
// point numbers are computed in 32 bits and rounded once, to even.
#pragma once
#include "types.hpp"

namespace hx {
// The values are part of the ABI.
enum class Dtype : i32 { U8, I8, I16, I32, I64, U16, U32, U64, BOOL, F16, BF16, F32, F64, C64, C128, DTYPES };
enum class Operator : i32 { SUM, PRODUCT, MIN, MAX, AND, OR, XOR, OPERATORS };

int element_bytes(Dtype dtype);
bool can_reduce(Dtype dtype, Operator op);  // as torch has it: no order of complex numbers, no bits of floating point numbers

struct Reduction {
  Dtype dtype = Dtype::F32;
  Operator op = Operator::SUM;
  i64 divisor = 1;  // of the last step; above 1 only for floating point and complex numbers

  // into = left op right for `count` elements; `last`: the result is divided. Any alignment; `into` may be `left` or `right`.
  void apply(void* into, const void* left, const void* right, std::size_t count, bool last) const;
};

const char* instruction_set();  // the widest that this processor has of those that were compiled in
}  // namespace hx
