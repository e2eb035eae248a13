// The loops of reductions for one instruction set. reduce.cpp includes this once for each, with
//   HX_SET, HX_WIDTH     the namespace, and the bytes of a vector,
//   HX_TARGET            the attribute that lets the compiler use the set,
//   HX_WIDEN, HX_NARROW  vectors of float16 to float32 and back, where the set has instructions for it.
// Vectors are those of g++ and clang (vector_size). A template over the set cannot replace the inclusion: a target is a
// literal, and g++ splits vectors that are too wide for a function's own target before it inlines the function.

namespace hx::HX_SET {
template <class T, int bytes>
struct Vector {
  typedef T type __attribute__((vector_size(bytes)));
};

// A codec: `lanes` elements of `bytes` in memory, and how they become a vector of type V, and again memory.
template <class T>
struct Plain {
  using V = typename Vector<T, HX_WIDTH>::type;
  static constexpr std::size_t lanes = HX_WIDTH / sizeof(T), bytes = HX_WIDTH;
  HX_TARGET static V load(const u8* from) {
    V v;
    std::memcpy(&v, from, bytes);
    return v;
  }
  HX_TARGET static void store(u8* into, V v) { std::memcpy(into, &v, bytes); }
};

struct Bool : Plain<u8> {
  HX_TARGET static V load(const u8* from) { return V(Plain::load(from) != 0) & 1; }  // bytes above 1 are true as well
};

// 16-bit floating point numbers are computed as float32. The even and the odd elements of a vector are separated where they are,
// by shifts and masks, which is cheaper than moving them. The machine is little-endian.
using Floats = Vector<float, HX_WIDTH>::type;
using Bits = Vector<u32, HX_WIDTH>::type;
struct Pair {
  Floats even, odd;
  HX_TARGET Pair operator/(Floats by) const { return {even / by, odd / by}; }
};

struct Bf16 {
  using V = Pair;
  static constexpr std::size_t lanes = HX_WIDTH / 2, bytes = HX_WIDTH;
  HX_TARGET static V load(const u8* from) {
    const Bits both = Plain<u32>::load(from);
    return {Floats(both << 16), Floats(both & 0xffff0000u)};
  }
  HX_TARGET static Bits rounded(Floats v) {  // to even, in the upper 16 bits
    const Bits bits = Bits(v), up = bits + (((bits >> 16) & 1) + 0x7fff);
    return v == v ? up : Bits{} + 0x7fc00000u;  // rounding would make an infinity of some NaN
  }
  HX_TARGET static void store(u8* into, V v) {
    Plain<u32>::store(into, (rounded(v.even) >> 16) | (rounded(v.odd) & 0xffff0000u));
  }
};

#ifdef HX_WIDEN
struct F16 {
  using V = Floats;
  static constexpr std::size_t lanes = HX_WIDTH / 4, bytes = HX_WIDTH / 2;
  using H = Vector<u16, bytes>::type;
  HX_TARGET static V load(const u8* from) {
    H h;
    std::memcpy(&h, from, bytes);
    return HX_WIDEN(h);
  }
  HX_TARGET static void store(u8* into, V v) {
    const H h = H(HX_NARROW(v));
    std::memcpy(into, &h, bytes);
  }
};
#else
struct F16 {
  using V = Pair;
  static constexpr std::size_t lanes = HX_WIDTH / 2, bytes = HX_WIDTH;
  // Subnormal float16 are scaled by addition: that rounds to even, and needs no subnormal float32, which a thread may flush.
  HX_TARGET static Floats widened(Bits half) {
    const Bits magnitude = (half & 0x7fff) << 13, exponent = magnitude & 0x0f800000, scale = Bits{} + (113u << 23);
    const Bits normal = magnitude + (112u << 23), subnormal = Bits(Floats(magnitude + scale) - Floats(scale));
    const Bits special = (magnitude + (224u << 23)) | ((magnitude & 0x007fffff) != 0 ? Bits{} + 0x00400000 : Bits{});
    const Bits value = exponent == 0x0f800000 ? special : exponent == 0 ? subnormal : normal;
    return Floats(value | ((half & 0x8000) << 16));
  }
  HX_TARGET static Bits rounded(Floats v) {
    const Bits sign = Bits(v) & 0x80000000u, magnitude = Bits(v) ^ sign;
    const Bits normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const Bits scale = Bits{} + (126u << 23);  // as a float: 0.5, whose unit in the last place is the least float16
    const Bits subnormal = Bits(Floats(magnitude) + Floats(scale)) - scale;
    const Bits special = magnitude > 0x7f800000 ? 0x7e00 | ((magnitude >> 13) & 0x3ff) : Bits{} + 0x7c00;
    const Bits value = magnitude >= 0x47800000 ? special : magnitude < 0x38800000 ? subnormal : normal;
    return value | (sign >> 16);
  }
  HX_TARGET static V load(const u8* from) {
    const Bits both = Plain<u32>::load(from);
    return {widened(both & 0xffff), widened(both >> 16)};
  }
  HX_TARGET static void store(u8* into, V v) { Plain<u32>::store(into, rounded(v.even) | (rounded(v.odd) << 16)); }
};
#endif

template <Operator op, class V>
HX_TARGET inline V combine(V a, V b) {
  if constexpr (op == Operator::SUM) return a + b;
  if constexpr (op == Operator::PRODUCT) return a * b;
  if constexpr (op == Operator::AND) return a & b;
  if constexpr (op == Operator::OR) return a | b;
  if constexpr (op == Operator::XOR) return a ^ b;
  // A NaN on the right fails the comparison and is chosen by it, one on the left by the second choice.
  if constexpr (op == Operator::MIN) return a == a ? (a < b ? a : b) : a;
  if constexpr (op == Operator::MAX) return a == a ? (a > b ? a : b) : a;
}

template <Operator op>
HX_TARGET inline Pair combine(Pair a, Pair b) {
  return {combine<op>(a.even, b.even), combine<op>(a.odd, b.odd)};
}

template <class C, Operator op, bool divided, class By>
HX_TARGET inline void step(u8* into, const u8* left, const u8* right, By by) {
  typename C::V v = combine<op>(C::load(left), C::load(right));
  if constexpr (divided) v = v / by;
  C::store(into, v);
}

template <class C, Operator op, bool divided>
HX_TARGET void reduce(u8* into, const u8* left, const u8* right, std::size_t count, i64 divisor) {
  using By = std::conditional_t<std::is_same_v<typename C::V, Pair>, Floats, typename C::V>;
  By by{};
  if constexpr (divided) by = by + static_cast<std::remove_cvref_t<decltype(by[0])>>(divisor);
  for (; count >= C::lanes; count -= C::lanes, into += C::bytes, left += C::bytes, right += C::bytes)
    step<C, op, divided>(into, left, right, by);
  if (count == 0) return;
  const std::size_t rest = count * (C::bytes / C::lanes);
  u8 a[C::bytes] = {}, b[C::bytes] = {};
  std::memcpy(a, left, rest);
  std::memcpy(b, right, rest);
  step<C, op, divided>(a, a, b, by);
  std::memcpy(into, a, rest);
}

template <class C, bool divided, Operator... ops>
Kernel of(Operator op) {
  Kernel found = nullptr;
  ((op == ops ? void(found = reduce<C, ops, divided>) : void()), ...);
  return found;
}

template <class C>
Kernel of_floats(Operator op, bool divided) {
  using enum Operator;
  return divided ? of<C, true, SUM, PRODUCT, MIN, MAX>(op) : of<C, false, SUM, PRODUCT, MIN, MAX>(op);
}

// nullptr where there is none. Some reductions have another's kernel: reduce.cpp, `Work`.
inline Kernel find(Dtype dtype, Operator op, bool divided) {
  using enum Operator;
  switch (dtype) {
    case Dtype::U8: return of<Plain<u8>, false, SUM, PRODUCT, MIN, MAX, AND, OR, XOR>(op);
    case Dtype::U16: return of<Plain<u16>, false, SUM, PRODUCT, MIN, MAX>(op);
    case Dtype::U32: return of<Plain<u32>, false, SUM, PRODUCT, MIN, MAX>(op);
    case Dtype::U64: return of<Plain<u64>, false, SUM, PRODUCT, MIN, MAX>(op);
    case Dtype::I8: return of<Plain<signed char>, false, MIN, MAX>(op);
    case Dtype::I16: return of<Plain<std::int16_t>, false, MIN, MAX>(op);
    case Dtype::I32: return of<Plain<i32>, false, MIN, MAX>(op);
    case Dtype::I64: return of<Plain<i64>, false, MIN, MAX>(op);
    case Dtype::BOOL: return of<Bool, false, AND, OR, XOR>(op);
    case Dtype::F16: return of_floats<F16>(op, divided);
    case Dtype::BF16: return of_floats<Bf16>(op, divided);
    case Dtype::F32: return of_floats<Plain<float>>(op, divided);
    case Dtype::F64: return of_floats<Plain<double>>(op, divided);
    default: return nullptr;
  }
}
}  // namespace hx::HX_SET

#undef HX_SET
#undef HX_TARGET
#undef HX_WIDTH
#undef HX_WIDEN
#undef HX_NARROW
