// Whether both ends of a link mean the same call by the same number (protocol/calls.py has the layout of an operation's name).
#pragma once
#include <map>

#include "types.hpp"

namespace hx {
class Agreement {
 public:
  static constexpr i64 NUMBER = (i64(1) << 31) - 1;  // which bits of a collective's name are its number
  static constexpr std::size_t KEPT = 256;           // operations that are remembered; ranks are a few apart

  // This rank begins `op`. Returns the peer's operation of the same number where it is another one, else 0.
  i64 begin(i64 op) {
    if (op <= NUMBER) return 0;
    keep(begun_, op);
    auto early = early_.find(op & NUMBER);
    if (early == early_.end()) return 0;
    const i64 theirs = early->second;
    early_.erase(early);
    return theirs == op ? 0 : theirs;
  }
  // A peer names `op`. Returns this rank's operation of the same number where it is another one, else 0.
  i64 unexpected(i64 op) {
    if (op <= NUMBER) return 0;
    auto ours = begun_.find(op & NUMBER);
    if (ours == begun_.end()) keep(early_, op);
    auto known = ours == begun_.end() ? early_.find(op & NUMBER) : ours;
    return known == early_.end() || known->second == op ? 0 : known->second;
  }

 private:
  static void keep(std::map<i64, i64>& kept, i64 op) {
    kept.emplace(op & NUMBER, op);
    if (kept.size() > KEPT) kept.erase(kept.begin());
  }
  std::map<i64, i64> begun_, early_;  // number -> operation
};
}  // namespace hx
