#include "link.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hx {
Link::Link(Owner& owner, Io& io, const Options& options, u32 generation, int peer, int rails, i64 now)
    : owner_(owner), io_(io), options_(options), generation_(generation), peer_(peer), now_(now), began_(now), ticked_(now),
      inbox_(options), outbox_(options), rails_(rails) {
  if (options.hopping.policy != HoppingOptions::Policy::NONE && rails > 1)
    paths_ = std::make_unique<Paths>(options, rails, options.seed + u64(peer) * 0x9e3779b97f4a7c15u);
}

// ---------------------------------------------------------------- messages

bool Link::send(Outgoing&& given) {
  if (over_) return false;
  if (closed_) return lost("it has closed"), false;
  const Name name = given.name;
  const bool single = !given.owner && given.length <= options_.keep_bytes;
  if (single) {
    given.kept.reset(new u8[given.length ? given.length : 1]);
    if (given.length) std::memcpy(given.kept.get(), given.data, given.length);
    given.data = given.kept.get();
    given.told = true;
  } else if (!given.owner) {
    given.prompt = true;
  }
  if (!outbox_.submit(std::move(given))) return false;
  if (single) {
    Outgoing told;
    told.name = name;
    owner_.sent(peer_, told);
  }
  return true;
}

void Link::receive(Incoming&& wanted) {
  if (over_) return;
  const Name name = wanted.name;
  Incoming whole;
  whole.name = name, whole.owner = wanted.owner, whole.node = wanted.node;
  std::string why;
  switch (inbox_.post(std::move(wanted), why)) {
    case Inbox::Posted::WAITS:
      break;
    case Inbox::Posted::CREDIT:
      outbox_.say(Kind::CREDIT, generation_, {{name.op, name.index, 0}});
      break;
    case Inbox::Posted::WHOLE:
      inbox_.release(name);
      owner_.received(peer_, whole);
  }
  if (!why.empty()) return lost(why);
  if (closed_ && inbox_.waits()) lost("it has closed");
}

void Link::tell(Outgoing& message) {
  if (!message.told) owner_.sent(peer_, message);
  message.told = true;
}

void Link::keep_short(const void* owner) {
  for (Outgoing* message : outbox_.of(owner)) {
    if (message->length > options_.keep_bytes) continue;
    Outgoing told;
    told.name = message->name, told.owner = message->owner, told.node = message->node;
    outbox_.keep(*message);
    owner_.sent(peer_, told);
  }
}

// ---------------------------------------------------------------- what comes

bool Link::readable(int rail, i64 now) {
  now_ = now;
  Rail& r = rails_[rail];
  if (!r.up()) return false;
  reading_ = rail;
  const i64 n = r.stream->read(*this);
  if (n > 0) r.heard = heard_ = now_;
  if (!garbage_.empty()) return fail(r, Failure::PATH, std::exchange(garbage_, {})), true;
  if (n < 0) fail(r, Failure::PATH, n == -ECONNRESET ? "the connection was closed" : std::strerror(int(-n)));
  return n != 0;
}

void Link::garbage(std::string_view what) { garbage_ = what; }

Partial* Link::fragment(const Header& h) {
  if (over_ || h.generation != generation_) return nullptr;
  acknowledged(h.floor, nullptr, 0);
  const Name name{h.op, h.index};
  if (!inbox_.expects(name) && !inbox_.ledger.has(h.sequence)) {
    std::string differs = owner_.differs(h.op);
    if (!differs.empty()) return end(End::MISMATCH, std::move(differs)), nullptr;
  }
  std::string why;
  Partial* partial = inbox_.begin(h, why);
  if (!why.empty()) return lost("it sent " + why), nullptr;
  return partial;
}

void Link::fragment_ended(const Header& h, Partial* partial) {
  if (over_ || h.generation != generation_) return;
  if (h.flags & ACK_ME) prompt_ = true;
  if (!partial) prompt_ = true, said_floor_ = 0;  // the peer does not know that it has come
  Incoming* message = inbox_.end(partial, h.sequence);
  note_farewell();
  if (!message) return;
  const Incoming whole = std::move(*message);
  inbox_.release(whole.name);
  owner_.received(peer_, whole);
}

void Link::note_farewell() {
  if (!farewell_ || closed_ || inbox_.ledger.floor() < farewell_) return;
  closed_ = true;
  owner_.note({Event::CLOSED, peer_, 0, 0, 0, {}});
}

void Link::frame(const Header& h, const u8* body) {
  if (over_ || h.generation != generation_) return;
  Rail& rail = rails_[reading_];
  acknowledged(h.floor, nullptr, 0);
  if (sequenced(h.kind)) {
    if (h.flags & ACK_ME) prompt_ = true;
    if (!inbox_.ledger.take(h.sequence)) return void((prompt_ = true, said_floor_ = 0));
    note_farewell();
  }
  switch (h.kind) {
    case Kind::CREDIT:
    case Kind::WANT:
      return names(h, body);
    case Kind::BYE:
      farewell_ = h.sequence;
      note_farewell();
      break;
    case Kind::ACK:
      counters(h, body);
      if (h.flags & ANSWER && h.op >= resume_least_) {
        resuming_ = false;
        for (Flight* flight : std::exchange(lost_, {})) outbox_.again(flight);
      }
      break;
    case Kind::RESUME:
      counters(h, body);
      say_counters(rail, Kind::ACK, h.op, ANSWER);
      break;
    case Kind::PROBE:
      if (!(h.flags & MORE)) say(rail, Kind::PROBED, h.op);
      break;
    case Kind::PROBED:
      if (paths_ && h.op < 0) paths_->answered(-h.op, now_);
      if (rail.state == Rail::PROBING && h.op == rail.probe) serve(rail);
      break;
    case Kind::BEAT: {
      std::string differs = h.op ? owner_.differs(h.op) : "";
      if (!differs.empty()) end(End::MISMATCH, std::move(differs));
      break;
    }
    case Kind::ABORT:
      end(End::PEER, std::string(reinterpret_cast<const char*>(body), h.body));
      break;
    default:
      break;
  }
}

void Link::names(const Header& h, const u8* body) {
  for (u64 at = 0; at + sizeof(WireName) <= h.body; at += sizeof(WireName)) {
    WireName name;
    std::memcpy(&name, body + at, sizeof name);
    if (h.kind == Kind::CREDIT) {
      if (!outbox_.credit({name.op, name.index})) return lost("it allowed more messages than there are");
    } else if (inbox_.want({name.op, name.index})) {
      outbox_.say(Kind::CREDIT, generation_, {name});
    }
    std::string differs = owner_.differs(name.op);
    if (!differs.empty()) return end(End::MISMATCH, std::move(differs));
  }
}

void Link::counters(const Header& h, const u8* body) {
  AckBody counts;
  if (h.body < sizeof counts) return;
  std::memcpy(&counts, body, sizeof counts);
  if (counts.consumed > outbox_.eager_out) return lost("it gave back more early messages than it got");
  outbox_.eager_back = std::max(outbox_.eager_back, counts.consumed);
  std::vector<u64> ranges((h.body - sizeof counts) / sizeof(u64));
  if (!ranges.empty()) std::memcpy(ranges.data(), body + sizeof counts, ranges.size() * sizeof(u64));
  acknowledged(counts.floor, ranges.data(), ranges.size() / 2);
}

void Link::acknowledged(u64 floor, const u64* ranges, u64 count) {
  if (floor > outbox_.newest()) return;
  outbox_.acknowledge(floor, ranges, count, held_, ended_);
  if (!held_.empty()) {
    for (Flight* flight : held_)
      if (rails_[flight->rail].up()) rails_[flight->rail].stream->let_go(flight);
    held_.clear();
  }
  if (!lost_.empty()) std::erase_if(lost_, [](Flight* flight) { return flight->acknowledged; });
  outbox_.prune();
  if (paths_) {
    for (const Outbox::Acknowledged& each : std::exchange(outbox_.measured, {}))
      paths_->acknowledged(each.rail, each.bytes, each.given, now_);
    paths_->settle(now_);
  }
  for (Outgoing* message : std::exchange(ended_, {})) {
    tell(*message);
    outbox_.release(message);
  }
}

// ---------------------------------------------------------------- what goes

void Link::say(Rail& rail, Kind kind, i64 op, u8 flags, const void* body, u64 bytes) {
  Header h;
  h.kind = kind, h.flags = flags, h.generation = generation_, h.op = op, h.body = u32(bytes), h.floor = inbox_.ledger.floor();
  rail.stream->say(h, body);
  rail.said = now_;
}

void Link::say_counters(Rail& rail, Kind kind, i64 op, u8 flags) {
  std::vector<u64> body{inbox_.ledger.floor(), inbox_.consumed};
  for (const auto& [first, last] : inbox_.ledger.ranges()) {
    if (body.size() * sizeof(u64) + 16 > CONTROL_BYTES) break;
    body.push_back(first), body.push_back(last);
  }
  say(rail, kind, op, flags, body.data(), body.size() * sizeof(u64));
  if (!rail.usable()) return;
  prompt_ = false, acknowledge_at_ = NEVER;
  said_floor_ = inbox_.ledger.floor(), said_taken_ = inbox_.ledger.taken(), said_consumed_ = inbox_.consumed;
}

Rail* Link::carrier(bool room) {
  Rail* best = nullptr;
  auto better = [&](Rail& r) {
    if (room && r.stream->queued() >= options_.rail_bytes) return;
    if (!best || r.stream->queued() < best->stream->queued()) best = &r;
  };
  const bool serving = usable() > 0;
  for (Rail& r : rails_)
    if (serving ? r.usable() : r.state == Rail::LEAVING || r.state == Rail::RESTING) better(r);
  return best;
}

void Link::pump() {
  if (paths_ && outbox_.next_long()) paths_->starting(now_);
  while (outbox_.has_next()) {
    Rail* rail = carrier(true);
    if (!rail) return;
    const u64 bytes = paths_ ? outbox_.next_long() : 0;
    if (bytes) {
      hop();
      if (!paths_->room(bytes, now_)) return;
      if (rails_[paths_->path()].usable()) rail = &rails_[paths_->path()];
    }
    Flight* flight = outbox_.next(generation_);
    if (!flight) return;
    flight->rail = number(*rail), flight->given = now_;
    if (bytes) paths_->given(flight->rail, bytes, now_);
    rail->stream->give(flight);
  }
}

void Link::hop() {  // carry out what the policy has decided
  u64 rails = 0;
  for (const Rail& r : rails_)
    if (r.usable() || (!r.up() && !r.number && r.reason.empty())) rails |= u64(1) << number(r);  // not yet connected is not lost
  paths_->usable(rails, now_);
  static const u8 padding[CONTROL_BYTES] = {};
  Paths::Decisions decisions = paths_->take();
  for (const auto& [rail, probe] : decisions.probes) {
    if (!rails_[rail].up()) continue;
    for (u64 left = options_.probe_bytes; left > 0;) {  // as many frames as make the probe; the last one is answered
      const u64 bytes = std::min(left, CONTROL_BYTES);
      left -= bytes;
      say(rails_[rail], Kind::PROBE, probe, left ? MORE : 0, padding, bytes);
    }
  }
  for (const auto& [rail, rtt] : decisions.probed) owner_.note({Event::PROBED, peer_, 0, rail, 0, std::to_string(rtt)});
  for (const HoppingPolicy::Action& hop : decisions.hops)
    owner_.note({Event::HOPPED, peer_, 0, hop.from, hop.to,
                 std::to_string(int(hop.reason)) + " " + std::to_string(hop.from_rtt) + " " + std::to_string(hop.to_rtt)});
}

void Link::write(Rail& rail) {
  const i64 n = rail.stream->write(inbox_.ledger.floor());
  if (n < 0) return fail(rail, Failure::PATH, std::strerror(int(-n)));
  if (n > 0) rail.said = now_;
  said_floor_ = std::max(said_floor_, rail.stream->floor_said);
  const bool want = !rail.stream->idle();
  if (want != rail.stream->want_write) io_.want_write(rail.stream->connection, rail.stream->want_write = want);
}

void Link::writable(int rail, i64 now) {
  now_ = now;
  if (rails_[rail].up()) write(rails_[rail]);
}

bool Link::owes() const {
  const Ledger& ledger = inbox_.ledger;
  return said_floor_ < ledger.floor() || said_consumed_ < inbox_.consumed || (!ledger.ranges().empty() && said_taken_ < ledger.taken());
}

void Link::flush(i64 now) {
  now_ = now;
  if (!over_) {
    recover();
    if (paths_) hop();
    pump();
    farewell();
    if (said_farewell_) pump();
  }
  for (Rail& r : rails_)
    if (r.up() && !r.stream->idle() && !r.stream->want_write) write(r);
  if (over_) return;
  if (inbox_.consumed - said_consumed_ > options_.eager_memory / 4) prompt_ = true;
  Rail* rail = owes() && prompt_ ? carrier(false) : nullptr;
  if (!owes()) {
    prompt_ = false, acknowledge_at_ = NEVER;
  } else if (rail) {
    say_counters(*rail, Kind::ACK, 0, 0);
    if (!rail->stream->want_write) write(*rail);
  } else if (acknowledge_at_ == NEVER) {
    acknowledge_at_ = now_ + options_.acknowledge;
  }
  if (!over_ && closed_ && unfinished()) lost("it has closed");
}

bool Link::unsaid() const {
  const bool farewell = !over_ && !closed_ && closing_ && !(said_farewell_ && const_cast<Link*>(this)->outbox_.flights().empty());
  return farewell || std::any_of(rails_.begin(), rails_.end(), [](const Rail& r) { return r.up() && !r.stream->idle(); });
}
}  // namespace hx
