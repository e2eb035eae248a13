// Messages to one peer, cut into fragments, and all frames with a sequence number until they are acknowledged.
#pragma once
#include <deque>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "io.hpp"
#include "ledger.hpp"
#include "wire.hpp"

namespace hx {
struct Outgoing {
  Name name;
  const u8* data = nullptr;
  u64 length = 0;
  void* owner = nullptr;  // Core's: an operation and its node, or null for a single message
  i32 node = 0;
  bool prompt = false;  // somebody waits for its acknowledgement
  bool eager = false, told = false;  // told: the owner has its memory back
  u64 cut = 0;      // bytes of it in fragments so far
  i32 flying = 0;   // fragments that are not acknowledged
  bool whole = false;  // all of it is in fragments
  std::unique_ptr<u8[]> kept;
};

struct Flight {  // a frame with a sequence number
  Header header;
  const u8* data = nullptr;
  std::unique_ptr<u8[]> own;  // the body, where it is no caller's memory
  Outgoing* message = nullptr;
  int rail = -1;       // the last one that it was given to
  bool queued = false;  // that rail has not written all of it
  bool acknowledged = false, again = false;  // again: to be given to a rail once more
  i64 given = 0;       // when
};

class Outbox {
 public:
  explicit Outbox(const Options& options) : options_(options) {}

  bool submit(Outgoing&& message);  // false: the name is in use
  bool credit(Name name);           // false: more than a peer can mean
  void say(Kind kind, u32 generation, std::vector<WireName> names);
  // The next frame that may go, or null. It counts as given.
  Flight* next(u32 generation);
  bool has_next() const;
  u64 next_long() const;  // bytes of the next frame, if it is of a message that needs a credit; else 0
  void again(Flight* flight);  // it was on a rail that failed, and the peer does not have it
  // The peer has all up to `floor`, and the ranges [first, last]. Frames that a rail still holds are put in `held`: it must let
  // go of them, and `prune` follows. Messages that are over are put in `ended`: `release` follows.
  void acknowledge(u64 floor, const u64* ranges, u64 count, std::vector<Flight*>& held, std::vector<Outgoing*>& ended);
  void prune();
  void release(Outgoing* message) { messages_.erase(message->name); }
  void keep(Outgoing& message);  // copies it, so that its memory can be given back
  std::vector<Outgoing*> of(const void* owner);
  void detach();  // nothing is read from callers' memory any more; what rails hold is for them to copy before

  std::deque<Flight>& flights() { return flights_; }  // oldest first; their addresses stay until `prune`
  u64 newest() const { return next_sequence_ - 1; }
  u64 outstanding() const { return bytes_; }
  bool waits() const { return !messages_.empty(); }
  bool all_cut() const;     // all of each message is in fragments
  bool unfinished() const;  // a message whose owner waits
  struct Acknowledged {
    int rail;
    u64 bytes;
    i64 given;
  };
  std::vector<Acknowledged> measured;  // fragments of long messages, with hopping; the link empties it
  u64 eager_out = 0, eager_back = 0;
  u64 fragments_again = 0;

 private:
  void ready(Outgoing& message);
  bool fits(u64 bytes) const { return !bytes_ || bytes_ + bytes <= options_.window_bytes; }
  void acknowledged(Flight& flight, std::vector<Flight*>& held, std::vector<Outgoing*>& ended);

  const Options options_;
  const bool hops_ = options_.hopping.policy != HoppingOptions::Policy::NONE;
  std::unordered_map<Name, Outgoing, NameHash> messages_;
  std::unordered_set<Name, NameHash> early_;  // credits for messages that were not submitted yet
  std::deque<Outgoing*> ready_;
  std::vector<WireName> wants_;
  std::deque<Flight> flights_;
  std::deque<Flight*> again_, control_;
  u64 next_sequence_ = 1, first_ = 1;  // of the next frame, and of flights_.front()
  u64 bytes_ = 0;                      // of fragments that are not acknowledged
};
}  // namespace hx
