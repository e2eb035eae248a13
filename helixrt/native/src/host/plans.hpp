// The plans of an engine, by number, and the checks of what is submitted against them.
#pragma once
#include <cerrno>
#include <memory>
#include <vector>

#include "../core.hpp"
#include "helixrt_native.h"

namespace hx {
constexpr bool divides(Dtype dtype) { return dtype >= Dtype::F16; }  // a mean has a type of its own elements

class Plans {
 public:
  i64 add(std::unique_ptr<const Plan> plan, int size) {
    Entry entry{std::move(plan), size, {}, 0, false, 0};
    for (int peer = 0; peer < size; peer++)
      if (!entry.plan->sends[std::size_t(peer)].empty() || !entry.plan->receives[std::size_t(peer)].empty())
        entry.peers.push_back(peer);
    for (const Node& node : entry.plan->nodes)
      if (node.kind == NodeKind::REDUCE || (node.flags & ON_ARRIVAL)) entry.reduces = true, entry.reduced |= node.bytes;
    entries_.push_back(std::move(entry));
    return i64(entries_.size()) - 1;
  }
  // 0, or -EINVAL for a call that would leave its memory, that cannot be computed, or that needs a link that `core` has not.
  i32 check(const hx_call& call, const Core& core) const {
    const Entry* entry = find(call.plan);
    if (!entry || entry->size != core.size() || call.timeout < 0) return -EINVAL;
    for (int peer : entry->peers)
      if (!core.link(peer)) return -EINVAL;
    const i64* most = entry->plan->most;
    if (call.source_bytes < most[0] || call.out_bytes < most[1]) return -EINVAL;
    if ((most[0] > 0 && !call.source) || (most[1] > 0 && !call.out)) return -EINVAL;
    if (!entry->reduces) return 0;
    if (call.dtype < 0 || call.dtype >= i32(Dtype::DTYPES) || call.op < 0 || call.op >= i32(Operator::OPERATORS)) return -EINVAL;
    const Dtype dtype = Dtype(call.dtype);
    if (!can_reduce(dtype, Operator(call.op)) || entry->reduced & (element_bytes(dtype) - 1)) return -EINVAL;
    return call.divisor >= 1 && (call.divisor == 1 || divides(dtype)) ? 0 : -EINVAL;
  }
  const Plan* use(i64 number) {
    entries_[std::size_t(number)].uses++;
    return entries_[std::size_t(number)].plan.get();
  }
  void leave(i64 number) { entries_[std::size_t(number)].uses--; }
  i32 remove(i64 number) {
    if (!find(number)) return -EINVAL;
    if (find(number)->uses) return -EBUSY;
    entries_[std::size_t(number)].plan.reset();
    return 0;
  }

 private:
  struct Entry {
    std::unique_ptr<const Plan> plan;  // null: removed; numbers are not used again
    int size;                          // of the generation
    std::vector<int> peers;
    i32 uses;
    bool reduces;
    i64 reduced;  // all lengths of reductions, or-ed: a multiple of a power of two if all are
  };
  const Entry* find(i64 number) const {
    if (number < 0 || number >= i64(entries_.size()) || !entries_[std::size_t(number)].plan) return nullptr;
    return &entries_[std::size_t(number)];
  }
  std::vector<Entry> entries_;
};
}  // namespace hx
