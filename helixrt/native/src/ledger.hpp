// Which sequence numbers have come, over all rails of a link: each counts once.
#pragma once
#include <iterator>
#include <map>

#include "types.hpp"

namespace hx {
class Ledger {
 public:
  bool has(u64 sequence) const {
    if (sequence <= floor_) return true;
    auto after = above_.upper_bound(sequence);
    return after != above_.begin() && std::prev(after)->second >= sequence;
  }
  bool take(u64 sequence) {  // false: it has come before
    if (has(sequence)) return false;
    taken_++;
    auto after = above_.upper_bound(sequence);
    const bool joins_next = after != above_.end() && after->first == sequence + 1;
    const u64 last = joins_next ? after->second : sequence;
    if (joins_next) after = above_.erase(after);
    if (after != above_.begin() && std::prev(after)->second + 1 == sequence) {
      std::prev(after)->second = last;
    } else if (sequence == floor_ + 1) {
      floor_ = last;
    } else {
      above_.emplace_hint(after, sequence, last);
    }
    if (!above_.empty() && above_.begin()->first == floor_ + 1) {
      floor_ = above_.begin()->second;
      above_.erase(above_.begin());
    }
    return true;
  }
  u64 taken() const { return taken_; }                           // how many have come
  u64 floor() const { return floor_; }                           // all up to here have come
  const std::map<u64, u64>& ranges() const { return above_; }    // and these: first -> last

 private:
  u64 floor_ = 0, taken_ = 0;
  std::map<u64, u64> above_;
};
}  // namespace hx
