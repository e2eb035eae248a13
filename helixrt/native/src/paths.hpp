// A link whose rails are paths through the network: what a hopping policy is told, and what it decides for the link.
//
// RTTs are taken from fragments of long messages, which are acknowledged at once: from when one was given to the rail, or the one before
// it was acknowledged if that came later, until its own acknowledgement. A path is given `depth_bytes` at a time, so that little is lost
// to one that turns out slow. What a path has it keeps: a switch moves new fragments only, which the receiver's ledger makes free.
#pragma once
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "hopping.hpp"
#include "io.hpp"

namespace hx {
class Paths {
 public:
  struct Decisions {  // for the link to carry out, in this order
    std::vector<std::pair<int, i64>> probes;  // path, number of the probe
    std::vector<HoppingPolicy::Action> hops;
    std::vector<std::pair<int, double>> probed;  // path, RTT: for the record
  };

  Paths(const Options& options, int rails, u64 seed);

  int path() const { return policy_->path; }
  bool room(u64 bytes, i64 now) const;  // whether a fragment of a long message may be given to the path in use
  void starting(i64 now);               // before the first long message
  void usable(u64 rails, i64 now);      // on which long messages may go
  void given(int rail, u64 bytes, i64 now);
  void acknowledged(int rail, u64 bytes, i64 given, i64 now);  // of a batch that one frame acknowledged
  void settle(i64 now);                                         // the batch is over
  void taken_back(int rail, u64 bytes, i64 now);                // the rail failed
  void answered(i64 number, i64 now);
  void tick(i64 now);
  i64 due() const;
  Decisions take() { return std::exchange(out_, {}); }

 private:
  struct Path {
    u64 bytes = 0;                    // given and not acknowledged
    std::map<i64, u64> given;         // when -> bytes; the first is what the path works on
    i64 acknowledged = 0;             // when something was last
    u64 delivered = 0, messages = 0;  // in this batch
    i64 begun = NEVER;
  };
  double seconds(i64 ns) const { return double(ns) * 1e-9; }
  double idle(u64 bytes) const { return options_.latency_s + double(bytes) / options_.rate_bytes_per_s; }
  double equal_sized(i64 took, u64 bytes) const;  // in a message of the standard size: as many times what an idle path takes
  i64 pending_due() const;
  void tell(const HoppingPolicy::Event& event, i64 now);
  void removed(Path& path, u64 bytes, i64 given);

  const Options options_;
  std::unique_ptr<HoppingPolicy> policy_;
  std::vector<Path> paths_;
  std::map<i64, std::pair<int, i64>> asked_;  // number of a probe -> path, when
  i64 probes_ = 0, told_ = 0, from_ = 0;      // told: of messages on their way; from: long messages wait until then
  u64 usable_ = 0;
  bool started_ = false;
  Decisions out_;
};
}  // namespace hx
