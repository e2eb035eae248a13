#include "paths.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace hx {
namespace {
using Told = HoppingPolicy::Kind;
i64 after(i64 now, double wait) { return std::isfinite(wait) ? now + i64(wait * 1e9) : NEVER; }
}  // namespace

Paths::Paths(const Options& options, int rails, u64 seed)
    : options_(options), policy_(HoppingPolicy::make(options.hopping, rails, seed)), paths_(rails),
      usable_(rails == HoppingPolicy::MOST_PATHS ? ~u64(0) : (u64(1) << rails) - 1) {}

double Paths::equal_sized(i64 took, u64 bytes) const {
  return std::max(1.0, seconds(took) / idle(bytes)) * idle(options_.standard_bytes);
}

bool Paths::room(u64 bytes, i64 now) const {
  if (policy_->looking || now < from_) return false;
  const u64 used = paths_[path()].bytes;
  return !used || (policy_->proven && used + bytes <= options_.depth_bytes);
}

void Paths::starting(i64 now) {
  if (!std::exchange(started_, true)) tell({Told::STARTING}, now);
}

void Paths::usable(u64 rails, i64 now) {
  if (rails == usable_) return;
  const u64 lost = usable_ & ~rails, back = rails & ~usable_;
  usable_ = rails;
  const int in_use = path();  // told last, so that no other lost path replaces it
  for (int rail = 0; rail < int(paths_.size()); rail++)
    if (rail != in_use && (lost >> rail & 1)) tell({Told::PATH_LOST, rail}, now);
  if (lost >> in_use & 1) tell({Told::PATH_LOST, in_use}, now);
  for (int rail = 0; rail < int(paths_.size()); rail++)
    if (back >> rail & 1) tell({Told::PATH_BACK, rail}, now);
}

void Paths::given(int rail, u64 bytes, i64 now) {
  paths_[rail].bytes += bytes;
  paths_[rail].given[now] += bytes;
  tell({Told::BEGUN, rail}, now);
}

void Paths::removed(Path& path, u64 bytes, i64 given) {
  path.bytes -= std::min(path.bytes, bytes);
  auto found = path.given.find(given);
  if (found == path.given.end()) return;
  found->second -= std::min(found->second, bytes);
  if (!found->second) path.given.erase(found);
}

void Paths::acknowledged(int rail, u64 bytes, i64 given, i64) {
  Path& path = paths_[rail];
  removed(path, bytes, given);
  path.delivered += bytes, path.messages++;
  path.begun = std::min(path.begun, given);
}

void Paths::settle(i64 now) {
  for (int rail = 0; rail < int(paths_.size()); rail++) {
    Path& path = paths_[rail];
    if (!path.delivered) continue;
    const i64 begun = std::max(path.begun, std::exchange(path.acknowledged, now));
    const u64 bytes = std::exchange(path.delivered, 0);
    path.begun = NEVER;
    for (u64 i = std::exchange(path.messages, 0); i > 0; i--) tell({Told::ENDED, rail}, now);
    if (usable_ >> rail & 1) tell({Told::MEASURED, rail, equal_sized(now - begun, bytes)}, now);
  }
}

void Paths::taken_back(int rail, u64 bytes, i64 now) {
  paths_[rail].bytes -= std::min(paths_[rail].bytes, bytes);
  paths_[rail].given.clear();
  tell({Told::ENDED, rail}, now);
}

void Paths::answered(i64 number, i64 now) {
  auto found = asked_.find(number);
  if (found == asked_.end()) return;
  const auto [rail, at] = found->second;
  asked_.erase(found);
  const double rtt = equal_sized(now - at, options_.probe_bytes);
  out_.probed.emplace_back(rail, rtt);
  tell({Told::ANSWERED, rail, rtt}, now);
}

void Paths::tick(i64 now) {
  if (from_ && now >= from_) from_ = 0;
  if (seconds(now) >= policy_->deadline()) tell({Told::TICK}, now);
  if (now < pending_due()) return;
  told_ = now;
  for (int rail = 0; rail < int(paths_.size()); rail++) {
    const Path& path = paths_[rail];
    if (path.given.empty()) continue;
    const auto [since, bytes] = *path.given.begin();
    tell({Told::PENDING, rail, equal_sized(now - std::max(since, path.acknowledged), bytes)}, now);
  }
}

i64 Paths::pending_due() const {
  const Path& path = paths_[policy_->path];
  if (path.given.empty() || !std::isfinite(policy_->patience())) return NEVER;
  const auto [since, bytes] = *path.given.begin();
  const double wait = policy_->patience() * idle(bytes) / idle(options_.standard_bytes);
  return std::max(after(std::max(since, path.acknowledged), wait), after(told_, options_.hopping.base));
}

i64 Paths::due() const {
  const double deadline = policy_->deadline();
  const i64 ticks = std::isfinite(deadline) ? i64(std::ceil(deadline * 1e9)) + 1 : NEVER;
  return std::min({ticks, pending_due(), from_ ? from_ : NEVER});
}

void Paths::tell(const HoppingPolicy::Event& event, i64 now) {
  HoppingPolicy::Actions actions;
  policy_->on(event, seconds(now), actions);
  for (HoppingPolicy::Action& action : actions) {
    for (int rail : action.probe) {
      asked_[++probes_] = {rail, now};
      out_.probes.emplace_back(rail, -probes_);
      while (asked_.size() > 4 * paths_.size()) asked_.erase(asked_.begin());  // these will not be answered any more
    }
    if (!action.probe.empty()) continue;
    from_ = action.at > seconds(now) ? i64(action.at * 1e9) : 0;
    out_.hops.push_back(std::move(action));
  }
}
}  // namespace hx
