#include "plan.hpp"

#include <algorithm>
#include <iterator>

#include "wire.hpp"

namespace hx {
namespace {
// What a node of each kind may have: flags, and the places that it uses (bit i: at[i]).
struct Form {
  i32 flags, places;
};
constexpr Form FORMS[] = {{0, 0b0001}, {LAST | ON_ARRIVAL, 0b0001}, {LAST | TWICE, 0b0111}, {0, 0b0101}};

bool within(i64 value, i64 below) { return value >= 0 && value < below; }

std::string outside(const char* what, i64 value, i64 below) {
  return std::string(what) + " " + std::to_string(value) + " is not in [0, " + std::to_string(below) + ")";
}

// Adds the next node from its row of the flat form. Returns what is wrong with it, or nothing.
std::string add(Plan& plan, const i64* row, int size) {
  constexpr i64 kinds = std::size(FORMS), longest = i64(MESSAGE_BYTES) + 1;
  const i64 kind = row[0], peer = row[1], index = row[2], flags = row[3], bytes = row[4];
  if (!within(kind, kinds)) return outside("kind", kind, kinds);
  const Form& form = FORMS[kind];
  if (flags & ~i64(form.flags)) return "flags " + std::to_string(flags) + " do not belong to kind " + std::to_string(kind);
  if (!within(bytes, longest)) return outside("length", bytes, longest);
  Node node{NodeKind(kind), 0, 0, i32(flags), bytes, {}};

  if (node.kind == NodeKind::SEND || node.kind == NodeKind::RECEIVE) {
    if (!within(peer, size)) return outside("peer", peer, size);
    const bool sent = node.kind == NodeKind::SEND;
    std::vector<i32>& messages = (sent ? plan.sends : plan.receives)[std::size_t(peer)];
    if (index != i64(messages.size())) {
      return "index " + std::to_string(index) + " of the message " + (sent ? "to" : "from") + " peer " + std::to_string(peer) +
             " should be " + std::to_string(messages.size());
    }
    messages.push_back(i32(plan.nodes.size()));
    plan.receive_count += !sent;
    node.peer = i32(peer);
    node.index = u32(index);
  }

  const i32 used = form.places | (flags & ON_ARRIVAL ? 0b0010 : 0) | (flags & TWICE ? 0b1000 : 0);
  for (int i = 0; i < 4; ++i) {
    const i64 space = row[5 + 2 * i], offset = row[6 + 2 * i];
    if (!(used >> i & 1)) continue;
    if (!within(space, 3)) return outside("space", space, 3);
    if (!within(offset, INT64_MAX - bytes)) return outside("offset", offset, INT64_MAX - bytes);
    node.at[i] = {i32(space), offset};
    plan.most[space] = std::max(plan.most[space], offset + bytes);
  }
  plan.nodes.push_back(node);
  return {};
}
}  // namespace

std::unique_ptr<const Plan> Plan::make(const i64* flat, i64 count, const i64* after, const i64* after_begin, i64 scratch_bytes,
                                       int size, std::string& why) {
  const auto refuse = [&why](std::string text) {
    why = std::move(text);
    return nullptr;
  };
  if (size < 1) return refuse("a plan needs at least one rank, not " + std::to_string(size));
  if (!within(count, INT32_MAX)) return refuse(outside("number of nodes", count, INT32_MAX));
  if (scratch_bytes < 0) return refuse("scratch memory of " + std::to_string(scratch_bytes) + " bytes");
  if (after_begin[0] != 0) return refuse("predecessors begin at entry " + std::to_string(after_begin[0]) + ", not 0");

  auto plan = std::make_unique<Plan>();
  plan->scratch_bytes = scratch_bytes;
  plan->sends.resize(std::size_t(size));
  plan->receives.resize(std::size_t(size));
  plan->nodes.reserve(std::size_t(count));
  plan->next_begin.assign(std::size_t(count) + 1, 0);
  for (i64 i = 0; i < count; ++i) {
    const std::string node = "node " + std::to_string(i) + ": ", wrong = add(*plan, flat + i * FIELDS, size);
    if (!wrong.empty()) return refuse(node + wrong);
    const i64 begin = after_begin[i], end = after_begin[i + 1];
    if (end < begin || end > INT32_MAX) return refuse(node + "its predecessors end at entry " + std::to_string(end));
    for (i64 k = begin; k < end; ++k) {
      if (!within(after[k], i)) return refuse(node + outside("predecessor", after[k], i));
      ++plan->next_begin[std::size_t(after[k]) + 1];
    }
    plan->waits.push_back(i32(end - begin));
    if (begin == end) plan->roots.push_back(i32(i));
  }
  if (plan->most[2] > scratch_bytes) {
    return refuse("it uses " + std::to_string(plan->most[2]) + " bytes of scratch memory of " + std::to_string(scratch_bytes));
  }

  // The edges, turned round: counted above, now summed and filled in ascending order.
  for (std::size_t i = 0; i < std::size_t(count); ++i) {
    plan->prompt.push_back(plan->next_begin[i + 1] > 0);
    plan->next_begin[i + 1] += plan->next_begin[i];
  }
  plan->next.resize(std::size_t(plan->next_begin.back()));
  std::vector<i32> filled(plan->next_begin.begin(), plan->next_begin.end() - 1);
  for (i64 i = 0; i < count; ++i) {
    for (i64 k = after_begin[i]; k < after_begin[i + 1]; ++k) plan->next[std::size_t(filled[std::size_t(after[k])]++)] = i32(i);
  }
  return plan;
}
}  // namespace hx
