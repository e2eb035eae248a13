#include "hopping.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace hx {
namespace {
constexpr double INF = HoppingPolicy::NEVER_S;
constexpr int LOOKS = 3;  // before the first message, at the most, until a path looks uncongested
constexpr u64 one(int path) { return u64(1) << path; }
}  // namespace

u64 Draw::next() {
  u64 z = (state_ += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// ---------------------------------------------------------------- the average of a path

void HoppingPolicy::Average::restart() { value = options_.base, ends_ = -INF, epoch_.clear(); }

bool HoppingPolicy::Average::look(double rtt, double now) {
  if (now < ends_) return false;
  ends_ = now + rtt;
  epoch_.clear();
  return true;
}

void HoppingPolicy::Average::take(double rtt) {
  epoch_.push_back(rtt);
  value = with(rtt);
}

double HoppingPolicy::Average::reached_by(double threshold) const {
  return std::max(options_.base, (threshold - (1 - options_.alpha) * value) / options_.alpha);
}

double HoppingPolicy::Average::predicted(int ahead) const {  // never falling: queues that stop to grow are not known to shrink
  const double count = double(epoch_.size()), last = epoch_.empty() ? value : epoch_.back(), middle = (count - 1) / 2;
  if (count < 2) return last;
  double sum = 0, rise = 0, squares = 0;
  for (double rtt : epoch_) sum += rtt;
  for (std::size_t i = 0; i < epoch_.size(); i++) {
    rise += (double(i) - middle) * (epoch_[i] - sum / count);
    squares += (double(i) - middle) * (double(i) - middle);
  }
  return std::max(last, sum / count + std::max(0.0, rise / squares) * (count - 1 - middle + ahead));
}

// ---------------------------------------------------------------- what all policies do

HoppingPolicy::HoppingPolicy(const HoppingOptions& options, int paths, u64 seed)
    : options_(options), draw_(seed), paths_(paths), average_(options_), under_way_(paths),
      usable_(paths == MOST_PATHS ? ~u64(0) : one(paths) - 1) {
  path = draw_.below(paths);
}

void HoppingPolicy::on(const Event& event, double now, Actions& out) {
  Event floored = event;  // RTTs below the base RTT count as that
  floored.rtt = std::max(event.rtt, options_.base);
  switch (event.kind) {
    case Kind::BEGUN:
      under_way_[event.path]++;
      break;
    case Kind::ENDED:
      under_way_[event.path] = std::max(0, under_way_[event.path] - 1);
      break;
    case Kind::MEASURED:
      measured(floored, now, out);
      break;
    case Kind::PENDING:
      pending(event.path, floored.rtt, now, out);
      break;
    case Kind::PATH_LOST:
      usable_ &= ~one(event.path);
      under_way_[event.path] = 0;
      forget(event.path);
      leave_lost(now, out);
      break;
    case Kind::PATH_BACK:
      usable_ |= one(event.path);
      leave_lost(now, out);
      break;
    default:
      probing(event, now, out);
  }
}

void HoppingPolicy::leave_lost(double now, Actions& out) {
  if (!(usable_ & one(path)) && usable_) go(refuge(now), Reason::LOST, average_.value, 0, now, now, out);
}

void HoppingPolicy::go(int to, Reason reason, double from_rtt, double to_rtt, double at, double, Actions& out) {
  out.push_back({{}, path, to, at, reason, from_rtt, to_rtt});
  path = to;
  average_.restart();
}

int HoppingPolicy::choice(u64 paths) {
  for (int skip = draw_.below(std::popcount(paths)); skip > 0; skip--) paths &= paths - 1;
  return std::countr_zero(paths);
}

// ---------------------------------------------------------------- Hopper

namespace {
class Hopper final : public HoppingPolicy {
 public:
  Hopper(const HoppingOptions& options, int paths, u64 seed) : HoppingPolicy(options, paths, seed), known_(paths) { proven = false; }

  double deadline() const override { return std::min(give_up_, look_at_); }
  double patience() const override {
    const double enough = options_.probe_above * options_.base;
    return suspected_ ? enough : average_.reached_by(enough);
  }

 private:
  // ---- congestion (section 3.1)
  void measured(const Event& e, double now, Actions& out) override {
    if (e.path != path) return remember(e.path, e.rtt, now);
    proven = true, suspected_ = false;
    look(e.rtt, now);
    average_.take(e.rtt);
    judge(average_.value, now, out);
  }
  void pending(int where, double rtt, double now, Actions& out) override {
    if (where != path) return remember(where, std::max(rtt, now < known_[where].until ? known_[where].rtt : 0), now);
    look(rtt, now);
    const double average = std::max(average_.value, average_.with(rtt));
    judge(suspected_ ? std::max(average, rtt) : average, now, out);
  }
  void look(double rtt, double now) {
    if (average_.look(rtt, now)) round_ = 0, decided_ = false;
  }
  void judge(double average, double now, Actions& out) {
    judged_ = average;
    if (looking) return;
    if (average > options_.probe_above * options_.base) probe(now, out);
    if (average > options_.switch_above * options_.base) decide(now, out);
  }

  // ---- probes (section 3.2)
  void probe(double now, Actions& out) {
    const u64 explored = explored_at(now), unexplored = others() & ~explored;
    if (asked_ || now < rest_until_ || (explored & round_) || !unexplored) return;
    std::vector<int> drawn = draw(unexplored);
    round_ = 0;
    for (int each : drawn) round_ |= one(each);
    ask(std::move(drawn), now + judged_, out);
  }
  std::vector<int> draw(u64 paths) {
    std::vector<int> all;
    for (; paths; paths &= paths - 1) all.push_back(std::countr_zero(paths));
    const std::size_t count = std::min<std::size_t>(options_.choices, all.size());
    for (std::size_t i = 0; i < count; i++) std::swap(all[i], all[i + draw_.below(int(all.size() - i))]);
    all.resize(count);
    return all;
  }
  void ask(std::vector<int> paths, double give_up, Actions& out) {
    asked_ = 0, give_up_ = give_up;
    for (int each : paths) asked_ |= one(each);
    out.push_back({std::move(paths), 0, 0, 0, {}, 0, 0});
  }
  void probing(const Event& e, double now, Actions& out) override {
    if (e.kind == Kind::STARTING) return start(now, out);
    if (e.kind == Kind::ANSWERED) {
      remember(e.path, std::max(e.rtt, options_.base), now);
      const bool idle = (asked_ & one(e.path)) && e.rtt <= options_.probe_above * options_.base;
      return settled(idle ? asked_ : one(e.path), now, out);
    }
    if (e.kind == Kind::UNANSWERED) {
      remember(e.path, INF, now);
      return settled(one(e.path), now, out);
    }
    if (now >= look_at_) look_around(now, out);
    if (now < give_up_) return;
    for (u64 each = asked_; each; each &= each - 1) remember(std::countr_zero(each), INF, now);
    settled(asked_, now, out);
  }
  void settled(u64 paths, double now, Actions& out) {  // of these is known what can be known; when that is so of all, decide
    if (!(asked_ & paths)) return;
    asked_ &= ~paths;
    if (asked_) return;
    give_up_ = INF;
    if (looking)
      looked(now, out);
    else if (judged_ > options_.switch_above * options_.base)
      decide(now, out);
  }

  // ---- before the first message
  void start(double now, Actions& out) {
    if (!started_ && options_.look_first && others()) {
      looking = true, look_at_ = now + draw_.unit() * options_.look_within;
      if (look_at_ <= now) look_around(now, out);
    }
    started_ = true;
  }
  void look_around(double now, Actions& out) {
    looks_++, look_at_ = INF;
    std::vector<int> paths = draw(others());
    paths.insert(paths.begin(), path);
    ask(std::move(paths), now + options_.base, out);
  }
  void looked(double now, Actions& out) {
    const double enough = options_.switch_above * options_.base;
    const u64 explored = explored_at(now);
    const double here = explored & one(path) ? known_[path].rtt : INF;
    const int best = best_of(explored);
    const double there = best < 0 ? INF : known_[best].rtt;
    if (std::min(here, there) > enough && looks_ < LOOKS && others()) return look_around(now, out);
    looking = false, proven = here <= enough, suspected_ = !proven;
    if (best >= 0 && there <= options_.better * here) go(best, Reason::LOOKED, here, there, now, now, out);
  }
  void remember(int where, double rtt, double now) { known_[where] = {rtt, now + options_.remember * options_.base}; }
  u64 explored_at(double now) const {
    u64 found = 0;
    for (int i = 0; i < paths_; i++)
      if (now < known_[i].until) found |= one(i);
    return found;
  }
  void forget(int where) override {
    known_[where].until = -INF;
    asked_ &= ~one(where);
    if (!asked_) give_up_ = INF, looking = look_at_ < INF;
  }

  // ---- switches (section 3.3)
  void decide(double now, Actions& out) {
    if (decided_ || asked_ || now < hold_until_) return;
    const u64 explored = explored_at(now);
    if (!(explored & others())) return;  // in an epoch longer than the time-to-live all results expire: not "neither is better"
    const int best = best_of(explored);
    decided_ = true;
    if (best >= 0 && known_[best].rtt <= options_.better * judged_) {
      const double rtt = known_[best].rtt;
      double at = now;
      if (options_.delayed) at += std::max(0.0, std::max(judged_, average_.predicted(under_way_[path])) - rtt);
      remember(path, judged_, now);
      go(best, Reason::CONGESTED, judged_, rtt, at, now, out);
    } else if (explored & round_) {
      rest_until_ = now + judged_;
    }
  }
  int best_of(u64 explored) {  // random among equals, so that not all senders select the same one
    u64 found = 0;
    double least = INF;
    for (u64 each = others() & explored; each; each &= each - 1) {
      const int where = std::countr_zero(each);
      if (known_[where].rtt < least) least = known_[where].rtt, found = 0;
      if (known_[where].rtt == least && std::isfinite(least)) found |= one(where);
    }
    return found ? choice(found) : -1;
  }
  int refuge(double now) override {
    const int best = best_of(explored_at(now));
    return best < 0 ? HoppingPolicy::refuge(now) : best;
  }
  void go(int to, Reason reason, double from_rtt, double to_rtt, double at, double now, Actions& out) override {
    HoppingPolicy::go(to, reason, from_rtt, to_rtt, at, now, out);
    proven = 0 < to_rtt && to_rtt <= options_.switch_above * options_.base;
    suspected_ = !proven && to_rtt > 0;
    hold_until_ = now + options_.remember * options_.base;
    round_ = 0, decided_ = false, judged_ = 0;
  }

  struct Known {
    double rtt = 0, until = -INF;
  };
  std::vector<Known> known_;
  u64 asked_ = 0, round_ = 0;  // probes without an answer; those of this epoch
  bool suspected_ = false;     // a probe said that the path is slow, and no message has come back yet
  bool decided_ = false, started_ = false;
  double give_up_ = INF, judged_ = 0, rest_until_ = -INF, hold_until_ = -INF, look_at_ = INF;
  int looks_ = 0;
};

// ---------------------------------------------------------------- the others

class FlowBender final : public HoppingPolicy {  // Kabbani et al., CoNEXT 2014: a random other path after an RTT of congestion
 public:
  FlowBender(const HoppingOptions& options, int paths, u64 seed) : HoppingPolicy(options, paths, seed) {}
  double patience() const override { return by_marks() ? INF : average_.reached_by(options_.switch_above * options_.base); }

 private:
  bool by_marks() const { return options_.policy == HoppingOptions::Policy::FLOWBENDER_ECN; }
  void measured(const Event& e, double now, Actions& out) override {
    if (e.path != path) return;
    if (by_marks()) return count(e, now, out);
    if (average_.look(e.rtt, now)) decided_ = false;
    average_.take(e.rtt);
    judge(average_.value, now, out);
  }
  void pending(int where, double rtt, double now, Actions& out) override {
    if (where != path || by_marks()) return;
    if (average_.look(rtt, now)) decided_ = false;
    judge(std::max(average_.value, average_.with(rtt)), now, out);
  }
  void count(const Event& e, double now, Actions& out) {
    if (ends_ == -INF) ends_ = now + e.rtt;
    acknowledged_++, marked_ += e.marked;
    if (now < ends_) return;
    const bool congested = marked_ > options_.marked_share * acknowledged_;
    acknowledged_ = marked_ = 0, ends_ = -INF;
    if (congested && others()) go(choice(others()), Reason::CONGESTED, e.rtt, 0, now, now, out);
  }
  void judge(double average, double now, Actions& out) {
    if (average <= options_.switch_above * options_.base || !others() || decided_) return;
    decided_ = true;
    go(choice(others()), Reason::CONGESTED, average, 0, now, now, out);
  }
  bool decided_ = false;  // in this epoch
  int acknowledged_ = 0, marked_ = 0;
  double ends_ = -INF;
};

class Ecmp final : public HoppingPolicy {  // a random path, kept
 public:
  Ecmp(const HoppingOptions& options, int paths, u64 seed) : HoppingPolicy(options, paths, seed) {}
};
}  // namespace

std::unique_ptr<HoppingPolicy> HoppingPolicy::make(const HoppingOptions& options, int paths, u64 seed) {
  switch (options.policy) {
    case HoppingOptions::Policy::HOPPER:
      return std::make_unique<Hopper>(options, paths, seed);
    case HoppingOptions::Policy::ECMP:
      return std::make_unique<Ecmp>(options, paths, seed);
    case HoppingOptions::Policy::NONE:
      return nullptr;
    default:
      return std::make_unique<FlowBender>(options, paths, seed);
  }
}
}  // namespace hx
