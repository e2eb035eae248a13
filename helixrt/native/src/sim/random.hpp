// Random numbers of a seed: the same on every machine.
#pragma once
#include <initializer_list>

#include "../types.hpp"

namespace hx::sim {
constexpr u64 mixed(u64 z) {
  z = (z + 0x9e3779b97f4a7c15) ^ (z >> 30);
  z = (z ^ (z >> 27)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 31)) * 0x94d049bb133111eb;
  return z ^ (z >> 29);
}

class Random {
 public:
  explicit Random(u64 seed) : state_(mixed(seed) | 1) {}

  u64 next() {
    state_ ^= state_ >> 12, state_ ^= state_ << 25, state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1d;
  }
  u64 below(u64 limit) { return limit ? (next() >> 8) % limit : 0; }
  bool one_in(u64 count) { return below(count) == 0; }
  template <typename T>
  T pick(std::initializer_list<T> from) {
    return from.begin()[below(from.size())];
  }

 private:
  u64 state_;
};
}  // namespace hx::sim
