// Path hopping: new messages leave a congested path for a better one, by measured round-trip times (Hopper, sections 3.1 to 3.3;
// all settings of its Table 1), and the policies that it is compared with.
//
//   average     of the RTTs of the path in use, the newest with weight alpha; a path begins with the base RTT
//   epoch       as long as the RTT that began it; one decision in each, and one round of probes as long as it is remembered
//   probe       average above `probe_above` base RTTs: `choices` random paths, of those not probed within the time-to-live
//   switch      average above `switch_above`: to the best path known, if that has at most `better` of the average
//   neither     both are remembered for the time-to-live, and nothing is probed for an epoch
//   delay       with `delayed`: the old path's RTT, continued in a straight line to what is under way on it, less the new one's
//
// Where the paper gives no rule, or measures what a host cannot: a message without an acknowledgement counts as if it ended now
// (PENDING). After a switch there is none for a time-to-live. Before the first message three paths are looked at (`look_first`), at a
// random time within `look_within`, so that senders which begin together see each other. A path that nothing has shown to be fast is
// given one message at a time (`proven`). An answer as fast as an idle path's ends the wait for the others.
//
// Update (what is known) and decision (what to do) are apart: `on` updates, then `judge` and `decide` act on it. No clock, no
// randomness but `Draw`. Times are in seconds; an RTT is that of a message of the standard size.
#pragma once
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "types.hpp"

namespace hx {
class Draw {  // splitmix64
 public:
  explicit Draw(u64 seed) : state_(seed) {}
  u64 next();
  int below(int n) { return int(next() % u64(n)); }
  double unit() { return double(next() >> 11) * 0x1.0p-53; }

 private:
  u64 state_;
};

struct HoppingOptions {
  enum class Policy : i32 { NONE, HOPPER, FLOWBENDER, ECMP, FLOWBENDER_ECN } policy = Policy::NONE;
  double base = 0;  // the base RTT: of a message of the standard size on an idle path
  double alpha = 0.2, probe_above = 1.5, switch_above = 2.5, better = 0.8, remember = 4;
  i32 choices = 2;
  bool look_first = true, delayed = false;
  double look_within = 0;           // seconds
  double marked_share = 0.05;       // FLOWBENDER_ECN: congested if more of an RTT's acknowledgements are marked
};

class HoppingPolicy {
 public:
  static constexpr int MOST_PATHS = 64;
  enum class Kind : u8 { STARTING, BEGUN, ENDED, MEASURED, PENDING, ANSWERED, UNANSWERED, PATH_LOST, PATH_BACK, TICK };
  enum class Reason : u8 { CONGESTED, LOOKED, LOST };
  struct Event {
    Kind kind;
    int path = 0;
    double rtt = 0;
    bool marked = false;  // by ECN
  };
  struct Action {
    std::vector<int> probe;  // send a probe on each; or, if that is empty, new messages go on `to` from `at` on
    int from = 0, to = 0;
    double at = 0;
    Reason reason{};
    double from_rtt = 0, to_rtt = 0;  // what the decision rests on; 0: not measured
  };
  using Actions = std::vector<Action>;

  static std::unique_ptr<HoppingPolicy> make(const HoppingOptions& options, int paths, u64 seed);
  virtual ~HoppingPolicy() = default;

  void on(const Event& event, double now, Actions& out);
  virtual double deadline() const { return NEVER_S; }  // of the next TICK
  virtual double patience() const { return NEVER_S; }  // PENDING is wanted when a message has been under way for so long

  int path = 0;          // where new messages go
  bool looking = false;  // messages wait
  bool proven = true;    // else the path in use is given one message at a time
  static constexpr double NEVER_S = std::numeric_limits<double>::infinity();

 protected:
  HoppingPolicy(const HoppingOptions& options, int paths, u64 seed);

  class Average {
   public:
    explicit Average(const HoppingOptions& options) : options_(options), value(options.base) {}
    void restart();
    bool look(double rtt, double now);  // whether a new epoch begins
    void take(double rtt);
    double with(double rtt) const { return options_.alpha * rtt + (1 - options_.alpha) * value; }
    double reached_by(double threshold) const;
    double predicted(int ahead) const;  // the RTT of the message that is `ahead` behind the last one, on the line through this epoch's

   private:
    const HoppingOptions& options_;
    double ends_ = -NEVER_S;
    std::vector<double> epoch_;

   public:
    double value;
  };

  virtual void measured(const Event&, double, Actions&) {}
  virtual void pending(int, double, double, Actions&) {}
  virtual void probing(const Event&, double, Actions&) {}
  virtual void forget(int) {}
  virtual int refuge(double) { return choice(usable_); }
  virtual void go(int to, Reason reason, double from_rtt, double to_rtt, double at, double now, Actions& out);
  u64 others() const { return usable_ & ~(u64(1) << path); }
  int choice(u64 paths);

  const HoppingOptions options_;
  Draw draw_;
  const int paths_;
  Average average_;
  std::vector<int> under_way_;
  u64 usable_;

 private:
  void leave_lost(double now, Actions& out);
};
}  // namespace hx
