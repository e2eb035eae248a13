// What one rank does in one collective: a graph of sends, receives, reductions and copies. Built in Python
// (protocol/collective/), flattened to integers, checked here. The same plan serves every call of its shape.
#pragma once
#include <memory>
#include <vector>

#include "types.hpp"

namespace hx {
enum class NodeKind : i32 { SEND = 0, RECEIVE = 1, REDUCE = 2, COPY = 3 };
enum NodeFlag : i32 {
  LAST = 1,        // the final reduction of its bytes: a mean is divided here
  ON_ARRIVAL = 2,  // a receive whose bytes are the right operand of a reduction
  TWICE = 4,       // a reduction that writes its result in two places
};

// Memory of an operation: 0 source, 1 out, 2 scratch.
struct Place {
  i32 space = 0;
  i64 offset = 0;
};

struct Node {
  NodeKind kind{};
  i32 peer = 0;
  u32 index = 0;  // of the message, counted for each ordered pair of ranks
  i32 flags = 0;
  i64 bytes = 0;
  Place at[4];  // [0] sent, received or written, [1] left operand, [2] right operand or copied from, [3] written as well
};

struct Plan {
  static constexpr int FIELDS = 13;  // of a node in the flat form: kind, peer, index, flags, bytes, then four places

  // `flat`: `count` nodes. Node i comes after nodes after[after_begin[i] .. after_begin[i + 1]), all smaller than i.
  // Null if that is no plan for `size` ranks: `why` says what is wrong. Lengths of source and out are the caller's to check
  // against `most`.
  static std::unique_ptr<const Plan> make(const i64* flat, i64 count, const i64* after, const i64* after_begin, i64 scratch_bytes,
                                          int size, std::string& why);

  std::vector<Node> nodes;
  std::vector<i32> waits;                            // how many nodes each node comes after
  std::vector<i32> next, next_begin;                 // the nodes that come after node n: next[next_begin[n] .. next_begin[n + 1])
  std::vector<i32> roots;                            // nodes that come after none
  std::vector<std::vector<i32>> sends, receives;     // [peer][index] -> node
  std::vector<u8> prompt;                            // [node]: something comes after it that needs its end
  i64 scratch_bytes = 0, most[3] = {};               // most: the end of the used part of each space
  i32 receive_count = 0;
};
}  // namespace hx
