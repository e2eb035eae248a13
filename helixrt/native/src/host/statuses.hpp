// How operations ended: by number, for some thousand operations back. Read without a lock.
#pragma once
#include <array>
#include <atomic>
#include <cerrno>

#include "../types.hpp"

namespace hx {
class Statuses {
 public:
  static constexpr i64 SLOTS = 8192;  // an ended one stays readable for as many later ones, less those that run

  Statuses() {
    for (Slot& slot : slots_) slot.word = EMPTY;
  }
  // Status, or -ENOENT for one that is too old, -EINVAL for a number that was not given yet.
  i32 get(i64 number) const {
    if (number < 0) return -EINVAL;
    const u64 word = slots_[std::size_t(number % SLOTS)].word.load();
    if (i64(word >> 2) == number) return i32(word & 3);  // one word: the status is never that of another operation
    return word != EMPTY && i64(word >> 2) > number ? -ENOENT : -EINVAL;
  }

  // With the engine's mutex held.
  i64 next() const { return next_; }
  bool room() const { return slot(next_).word.load() & 3; }  // false: one from very long ago still runs
  i64 begin(i64 plan, bool announced) {
    slot(next_).plan = plan, slot(next_).announced = announced;
    slot(next_).word = u64(next_) << 2 | RUNNING;
    running_++;
    return next_++;
  }
  bool end(i64 number, Status status) {  // false: it does not run
    if (get(number) != RUNNING) return false;
    slot(number).word = u64(number) << 2 | u64(status);
    running_--;
    return true;
  }
  i64 plan(i64 number) const { return slot(number).plan; }  // while it runs
  bool announced(i64 number) const { return slot(number).announced; }
  i64 running() const { return running_; }

 private:
  static constexpr u64 EMPTY = ~u64(0);
  struct Slot {
    std::atomic<u64> word;  // number, then two bits of Status
    i64 plan = 0;
    bool announced = false;  // its end is an event
  };
  Slot& slot(i64 number) { return slots_[std::size_t(number % SLOTS)]; }
  const Slot& slot(i64 number) const { return slots_[std::size_t(number % SLOTS)]; }

  std::array<Slot, SLOTS> slots_;
  i64 next_ = 0, running_ = 0;
};
}  // namespace hx
