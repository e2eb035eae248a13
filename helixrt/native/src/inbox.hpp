// Messages of one peer: those that were asked for, and short ones that came before.
//
// A fragment can come twice, on two rails, also at the same time, and on either rail only a part of it. `Partial::taken` counts the
// bytes that have counted; a rail that brings earlier ones has them dropped. So no byte is added twice to a sum, whichever rail
// brings it, and no rail needs to know of another.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "io.hpp"
#include "ledger.hpp"
#include "reduce.hpp"
#include "wire.hpp"

namespace hx {
struct Incoming {
  Name name;
  u64 length = 0;
  u8* into = nullptr;
  const u8* left = nullptr;              // with it, into = left op the bytes
  const Reduction* reduction = nullptr;  // of `left`
  bool last = false;
  void* owner = nullptr;  // Core's: an operation and its node, or null for a single message
  i32 node = 0;
  bool posted = false;
  u64 missing = 0;
  u64 eager = 0;               // bytes of the memory for early messages that it holds
  std::unique_ptr<u8[]> held;  // where its bytes are put if it was not posted when the first came
};

struct Partial {  // a fragment that has begun to come
  Incoming* message = nullptr;  // null: its bytes are dropped
  u64 offset = 0, bytes = 0, taken = 0;
  u32 carry = 0;  // bytes of an element that has not come whole
  u8 rest[16];
  int readers = 0;  // rails that are in the middle of it
  bool whole = false;
};

class Inbox {
 public:
  enum class Posted { WAITS, CREDIT, WHOLE };

  explicit Inbox(const Options& options) : options_(options), stage_(new u8[STAGE]) {}

  // `wanted`: name, length and destination. CREDIT: the peer waits for leave to send it. WHOLE: it had come, and was delivered.
  // `why` is set for what can never fit.
  Posted post(Incoming&& wanted, std::string& why);
  // A fragment begins. Null: all of it is dropped. `why` is set if the peer may not send it.
  Partial* begin(const Header& header, std::string& why);
  // Where the next bytes go, of which this rail has brought `position` so far, and how many at most.
  void target(Partial* partial, u64 position, u64 left, u8*& into, u64& most);
  void took(Partial* partial, u64 position, u64 bytes);
  // This rail has brought all of the fragment. Returns the message if it is whole and delivered now: `release` it.
  Incoming* end(Partial* partial, u64 sequence);
  void leave(Partial* partial, u64 sequence);  // the rail broke in the middle
  void release(Name name) { messages_.erase(name); }
  bool want(Name name);  // the peer waits for memory for this short message; true: send a credit now
  void detach();         // from now on nothing is written into memory of a caller

  bool waits() const { return posted_ > 0; }  // for messages that were asked for
  bool expects(Name name) const { return messages_.count(name) != 0; }
  Ledger ledger;
  u64 consumed = 0;    // eager bytes given back
  u64 duplicates = 0;  // fragments

 private:
  static constexpr u64 STAGE = 256 << 10;
  void deliver(Incoming& message);
  void drop(u64 sequence, Partial& partial);

  const Options options_;
  std::unordered_map<Name, Incoming, NameHash> messages_;
  std::map<u64, Partial> partials_;  // [sequence]
  std::unordered_set<Name, NameHash> wanted_;
  std::unique_ptr<u8[]> stage_;
  u64 early_ = 0;  // bytes that are held, or on their way, before they were asked for
  i64 posted_ = 0;
};
}  // namespace hx
