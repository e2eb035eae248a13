// The rails of a link: failover, fail-back, slow rails, liveness, and the link's end.
#include <algorithm>
#include <sstream>
#include <utility>

#include "link.hpp"

namespace hx {
int Link::usable() const { return int(std::count_if(rails_.begin(), rails_.end(), [](const Rail& r) { return r.usable(); })); }

// ---------------------------------------------------------------- connections come

void Link::rail_up(int rail, int connection, u32 number, i64 now) {
  now_ = now;
  Rail& r = rails_[rail];
  if (over_ || closed_ || number <= r.number) return io_.close(connection);
  if (r.up()) fail(r, Failure::PATH, "the peer connected again");
  const bool first = r.number == 0;
  r.stream = std::make_unique<Stream>(io_, inbox_, options_, connection);
  r.number = number, r.restoring = false;
  r.heard = r.said = heard_ = now_;
  if (first)
    serve(r);
  else
    probe(r);
}

void Link::probe(Rail& r) {
  r.state = Rail::PROBING, r.due = now_ + options_.answer;
  r.probe = ++probes_;
  say(r, Kind::PROBE, r.probe);
}

void Link::serve(Rail& r) {
  r.state = Rail::SERVING, r.since = now_, r.due = NEVER;
  prompt_ = true, said_floor_ = said_taken_ = 0;  // what was said on a rail that failed may not have come
  if (!std::exchange(r.left, false)) return;
  r.returns++;
  owner_.note({Event::RAIL_BACK, peer_, 0, number(r), usable(), {}});
}

// ---------------------------------------------------------------- connections fail

void Link::rail_down(int rail, Failure failure, std::string_view reason, i64 now) {
  now_ = now;
  Rail& r = rails_[rail];
  if (over_ || closed_) return;
  if (r.up()) return fail(r, failure, reason);
  r.restoring = false, r.failure = failure, r.reason = reason;
  r.due = std::max(now_, r.asked + options_.retry * (failure == Failure::DEVICE ? 4 : 1));
  const bool none = std::none_of(rails_.begin(), rails_.end(), [](const Rail& each) { return each.up(); });
  if (failure == Failure::PROGRAM || (failure == Failure::PEER_GONE && none)) lost(reason);
}

void Link::fail(Rail& r, Failure failure, std::string_view reason) {
  const bool served = r.state == Rail::SERVING || r.state == Rail::LEAVING;
  Stream& stream = *r.stream;
  stream.leave();
  for (Flight& flight : outbox_.flights()) {
    if (flight.acknowledged || flight.again || flight.rail != number(r)) continue;
    if (paths_ && flight.message && flight.header.length > options_.eager_bytes)
      paths_->taken_back(flight.rail, flight.header.body, now_);
    if (std::find(lost_.begin(), lost_.end(), &flight) != lost_.end()) continue;
    flight.given = 0;  // it is on no rail now
    if (flight.queued)
      flight.queued = false, outbox_.again(&flight);  // not all of it was written, so the peer cannot have it
    else
      lost_.push_back(&flight), resume_least_ = resume_ + 1;
  }
  for (Flight* flight : stream.queue()) flight->queued = false;
  outbox_.prune();
  r.frames_sent += stream.frames_sent, r.frames_received += stream.frames_received;
  r.bytes_sent += stream.bytes_sent, r.bytes_received += stream.bytes_received;
  io_.close(stream.connection);
  r.stream.reset();
  r.state = Rail::DOWN, r.failure = failure, r.reason = reason, r.failures += !over_, failed_ = now_;
  resuming_ = false;  // it may have been on this rail
  if (over_ || closed_) return;
  prompt_ = true, said_floor_ = said_taken_ = 0;
  pause(r);
  if (served || !r.left) left(r, i64(failure), reason);
  if (failure == Failure::PROGRAM) lost(reason);
}

void Link::pause(Rail& r) {  // a rail that fails again and again is used less and less
  if (r.since && now_ - r.since >= options_.steady) r.rest = 0;
  r.due = now_ + r.rest;
  r.rest = std::min(options_.longest_rest, r.rest ? 2 * r.rest : options_.rest);
}

void Link::left(Rail& r, i64 failure, std::string_view reason) {
  if (std::exchange(r.left, true)) return;
  owner_.note({Event::RAIL_LEFT, peer_, failure, number(r), usable(), std::string(reason)});
}

void Link::rail_slow(int rail, i64 now) {
  now_ = now;
  Rail& r = rails_[rail];
  if (over_ || !r.usable() || usable() < 2) return;
  r.state = Rail::LEAVING, r.due = NEVER;
  left(r, -1, "it is slow");
}

bool Link::draining(const Rail& r) {
  if (!r.stream->idle()) return true;
  const int rail = number(r);
  return std::any_of(outbox_.flights().begin(), outbox_.flights().end(),
                     [rail](const Flight& f) { return !f.acknowledged && f.rail == rail; });
}

void Link::recover() {
  for (Rail& r : rails_) {
    if (r.state == Rail::LEAVING && !draining(r)) {
      r.state = Rail::RESTING;
      pause(r);
      r.due = std::max(r.due, now_ + options_.rest);
    }
    if (r.state == Rail::DOWN && (r.number || !r.reason.empty()) && !r.restoring && !closed_ && now_ >= r.due) {
      r.restoring = true, r.asked = now_, r.due = NEVER;
      owner_.note({Event::RESTORE, peer_, 0, number(r), i64(r.number) + 1, {}});
    }
  }
  if (lost_.empty() || (resuming_ && now_ < resume_until_)) return;
  Rail* rail = carrier(false);
  if (!rail) return void(resuming_ = false);
  resuming_ = true, resume_++, resume_until_ = now_ + options_.answer;
  say_counters(*rail, Kind::RESUME, resume_, 0);
}

// ---------------------------------------------------------------- time

void Link::tick(i64 now) {
  now_ = now;
  const i64 slept = now_ - std::exchange(ticked_, now_);
  if (over_) return;
  if (now_ >= acknowledge_at_) prompt_ = true;
  if (paths_) paths_->tick(now_);
  if (options_.period && slept > options_.period / 2 && heard_) heard_ = std::max(heard_, now_ - options_.period);
  bool up = false;
  for (Rail& r : rails_) {
    if (!r.up()) continue;
    up = true;
    if (r.state == Rail::PROBING && now_ >= r.due) fail(r, Failure::PATH, "no answer to a probe");
    if (r.state == Rail::RESTING && now_ >= r.due) probe(r);
    if (r.up() && options_.period && now_ - r.said >= options_.period / 4) say(r, Kind::BEAT, owner_.awaited());
  }
  if (over_) return;
  for (const Flight& flight : outbox_.flights()) {  // the oldest that is on a rail
    if (flight.acknowledged || flight.again || !flight.given) continue;
    Rail& r = rails_[flight.rail];
    if (now_ - flight.given >= options_.attempt && r.up()) fail(r, Failure::PATH, "a frame was not acknowledged in time");
    break;
  }
  if (over_ || closed_) return;
  if (!heard_ && now_ - began_ >= options_.connect) return lost("no rail was connected in time");
  const i64 silence = now_ - (options_.period ? heard_ : std::max(heard_, failed_));  // without beats an idle rail is silent
  const i64 limit = options_.period ? options_.period * 3 / 2 : up ? NEVER : options_.attempt;
  if (!heard_ || silence < limit) return;
  std::ostringstream text;
  text.precision(2);
  text << std::fixed << "no sign of life for " << double(silence) / 1e9 << " s";
  for (const Rail& r : rails_)
    if (!r.up() && !r.reason.empty()) text << " (rail " << number(r) << ": " << r.reason << ")";
  lost(text.str());
}

i64 Link::due() const {
  if (over_) return NEVER;
  i64 due = prompt_ ? NEVER : acknowledge_at_;  // what is due is said as soon as a rail carries it
  if (paths_) due = std::min(due, paths_->due());
  bool up = false;
  for (const Rail& r : rails_) {
    up |= r.up();
    if (!(r.state == Rail::DOWN && ((!r.number && r.reason.empty()) || closed_))) due = std::min(due, r.due);
    if (r.up() && options_.period) due = std::min(due, r.said + options_.period / 4);
  }
  if (resuming_ && !lost_.empty()) due = std::min(due, resume_until_);
  for (const Flight& flight : const_cast<Link*>(this)->outbox_.flights()) {
    if (flight.acknowledged || flight.again || !flight.given) continue;
    if (rails_[flight.rail].up()) due = std::min(due, flight.given + options_.attempt);
    break;
  }
  if (closed_) return due;
  if (!heard_) return std::min(due, began_ + options_.connect);
  if (options_.period) due = std::min(due, ticked_ + options_.period / 4);  // else a sleep would count as that of this process
  if (options_.period || !up) due = std::min(due, options_.period ? heard_ + options_.period * 3 / 2 : std::max(heard_, failed_) + options_.attempt);
  return due;
}

// ---------------------------------------------------------------- ends

void Link::end(End end, std::string cause) {
  if (std::exchange(over_, true)) return;
  owner_.ended(peer_, end, std::move(cause));
}

void Link::lost(std::string_view reason) {
  if (closing_ && !unfinished()) return void(closed_ = true);  // both ends are done
  end(End::PEER, "lost rank " + std::to_string(peer_) + ": " + std::string(reason));
}

void Link::lose(std::string_view reason) { lost(reason); }

void Link::abort(std::string_view cause) {
  over_ = true;
  inbox_.detach();
  for (Rail& r : rails_) {
    if (!r.up()) continue;
    r.stream->cut();
    say(r, Kind::ABORT, 0, 0, cause.data(), std::min<u64>(cause.size(), CONTROL_BYTES));
  }
  lost_.clear();
  outbox_.detach();
}

void Link::close() {
  closing_ = true;
}

void Link::farewell() {  // the last frame: all of each message has a sequence number by now
  if (!closing_ || said_farewell_ || !outbox_.all_cut()) return;
  said_farewell_ = true;
  outbox_.say(Kind::BYE, generation_, {});
  outbox_.flights().back().header.flags |= ACK_ME;
}

std::string Link::print() const {
  std::ostringstream text;
  text << "  peer " << peer_ << (over_ ? " over" : "") << (closed_ ? " closed" : "") << ": unacknowledged "
       << const_cast<Link*>(this)->outbox_.flights().size() << ", floor " << inbox_.ledger.floor() << "+"
       << inbox_.ledger.ranges().size() << ", lost " << lost_.size() << (resuming_ ? " resuming" : "") << (unfinished() ? " unfinished" : "")
       << "\n";
  for (const Rail& r : rails_) {
    text << "    rail " << number(r) << " state " << int(r.state) << " connection " << r.number;
    if (r.up()) text << " queued " << r.stream->queued() << (r.stream->want_write ? " blocked" : "");
    if (!r.reason.empty()) text << " (" << r.reason << ")";
    text << "\n";
  }
  return text.str();
}
}  // namespace hx
