// Shows the tests what `Plan::make` makes, without an engine.
#include <cstring>

#include "plan.hpp"

namespace {
std::unique_ptr<const hx::Plan> made;

std::int64_t put(const std::vector<std::int32_t>& from, std::int64_t* into) {
  for (std::int32_t value : from) *into++ = value;
  return std::int64_t(from.size());
}
}  // namespace

extern "C" {
// 1 for a plan; 0 for none, and then `why` says why.
int hx_test_plan(std::int64_t size, const std::int64_t* flat, std::int64_t count, const std::int64_t* after,
                 const std::int64_t* after_begin, std::int64_t scratch_bytes, char* why, std::size_t why_bytes) {
  std::string reason;
  made = hx::Plan::make(flat, count, after, after_begin, scratch_bytes, int(size), reason);
  std::strncpy(why, reason.c_str(), why_bytes - 1);
  return made != nullptr;
}

// A list of the last plan, by name; returns its length. `peer`: of sends and receives.
std::int64_t hx_test_list(const char* name, std::int64_t peer, std::int64_t* into) {
  const std::string wanted = name;
  if (wanted == "waits") return put(made->waits, into);
  if (wanted == "next") return put(made->next, into);
  if (wanted == "next_begin") return put(made->next_begin, into);
  if (wanted == "roots") return put(made->roots, into);
  if (wanted == "sends") return put(made->sends[std::size_t(peer)], into);
  if (wanted == "receives") return put(made->receives[std::size_t(peer)], into);
  if (wanted == "prompt") return put({made->prompt.begin(), made->prompt.end()}, into);
  if (wanted == "most") return put({std::int32_t(made->most[0]), std::int32_t(made->most[1]), std::int32_t(made->most[2])}, into);
  if (wanted == "counts") return put({std::int32_t(made->nodes.size()), made->receive_count, std::int32_t(made->scratch_bytes)}, into);
  return -1;
}
}
