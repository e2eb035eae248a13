// What travels on a rail: a header, then `body` bytes. Little-endian; both ends of a connection prove the same protocol number
// before the first frame (rendezvous).
#pragma once
#include <bit>

#include "types.hpp"

namespace hx {
static_assert(std::endian::native == std::endian::little, "frames are written as they lie in memory");

constexpr u32 PROTOCOL = 1;
constexpr u16 MAGIC = 0x4858;
#ifndef HX_FRAGMENT_BYTES  // smaller in the simulation
#define HX_FRAGMENT_BYTES (1 << 20)
#endif
constexpr u64 FRAGMENT_BYTES = HX_FRAGMENT_BYTES;  // of a message in one frame, at most; a multiple of every element size
constexpr u64 CONTROL_BYTES = 4096;       // of the body of a frame that is no DATA, at most
constexpr u64 MESSAGE_BYTES = u64(1) << 46;

enum class Kind : u8 {
  NONE,
  // With a sequence number: kept by the sender until they are acknowledged, taken once by the receiver.
  DATA,    // bytes [offset, offset + body) of message (op, index), which has `length`
  CREDIT,  // body: Names of messages that may be sent
  WANT,    // body: Names of short messages that wait for memory of the receiver
  BYE,     // the last one: this end closes in order
  // Without one: what they say is true whenever they come.
  ACK,     // body: AckBody, then pairs of sequence numbers [first, last] above the floor
  RESUME,  // as ACK; asks for an ACK with ANSWER and the same `op`
  PROBE,   // asks for PROBED with the same `op` on the same rail
  PROBED,
  BEAT,    // `op`: the oldest operation that this end waits for, or 0
  ABORT,   // body: the cause, as text
  KINDS,
};
constexpr bool sequenced(Kind kind) { return kind >= Kind::DATA && kind <= Kind::BYE; }

enum Flag : u8 {
  ACK_ME = 1,  // somebody waits for the acknowledgement
  EAGER = 2,   // counts against the receiver's memory for messages that were not asked for yet
  ANSWER = 4,
  MORE = 8,    // of a PROBE: it has further frames, and the last one is answered
};

struct Header {
  u16 magic = MAGIC;
  Kind kind = Kind::NONE;
  u8 flags = 0;
  u32 generation = 0;
  u32 index = 0;
  u32 body = 0;      // bytes behind this header
  u64 sequence = 0;  // 0: none
  u64 floor = 0;     // all of the peer's sequence numbers up to this one have come
  i64 op = 0;
  u64 offset = 0, length = 0;
};
static_assert(sizeof(Header) == 56);

struct WireName {
  i64 op;
  u32 index, unused;
};
static_assert(sizeof(WireName) == 16);
constexpr u64 NAMES = CONTROL_BYTES / sizeof(WireName);

struct AckBody {
  u64 floor, consumed;  // consumed: eager bytes given back so far
};
}  // namespace hx
