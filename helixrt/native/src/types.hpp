// Numbers and the words for how things end, shared by all of the library.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace hx {
using i64 = std::int64_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using u32 = std::uint32_t;
using u16 = std::uint16_t;
using u8 = std::uint8_t;

constexpr i64 NEVER = INT64_MAX;  // a time in ns that does not come

// How an operation ended. The values are part of the ABI.
enum Status : i32 {
  RUNNING = 0,
  OK = 1,
  FAILED = 2,   // it had begun; what it writes is undefined
  SKIPPED = 3,  // the generation was over before it began; nothing was read or written
};

// Why a generation is over. The values are part of the ABI.
enum class End : i32 {
  NONE = 0,
  ABORTED = 1,  // by the caller
  PEER = 2,     // a peer aborted, closed, or is lost
  DEADLINE = 3,
  MISMATCH = 4,  // the peer calls another operation
};

// Why a rail failed; decides who may try again, and where (DESIGN.md, "Link"). The values are part of the ABI.
enum class Failure : i32 {
  PATH = 0,       // the way between the two ends: frames go elsewhere, the rail is tried again after a pause
  DEVICE = 1,     // our own device: the same, after a longer pause
  CASCADE = 2,    // a consequence of another failure, whose cause stands
  PROGRAM = 3,    // a use that can never work: the link is lost
  PEER_GONE = 4,  // no process listens at the peer's end: without another rail the link is lost at once
};

// The name of a message between two ranks of a generation; each is used once in each direction.
struct Name {
  i64 op = 0;
  u32 index = 0;
  bool operator==(const Name&) const = default;
};
struct NameHash {
  std::size_t operator()(const Name& n) const { return (u64(n.op) * 0x9e3779b97f4a7c15u) ^ (u64(n.index) * 0xc2b2ae3d27d4eb4fu); }
};
}  // namespace hx
