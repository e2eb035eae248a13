#include "outbox.hpp"

#include <algorithm>
#include <cstring>

namespace hx {
bool Outbox::submit(Outgoing&& given) {
  auto [found, fresh] = messages_.try_emplace(given.name, std::move(given));
  if (!fresh) return false;
  Outgoing& m = found->second;
  if (early_.erase(m.name)) return ready(m), true;
  if (m.length > options_.eager_bytes) return true;
  if (eager_out - eager_back + m.length <= options_.eager_memory) {
    m.eager = true;
    eager_out += m.length;
    ready(m);
  } else {
    wants_.push_back({m.name.op, m.name.index, 0});
  }
  return true;
}

void Outbox::ready(Outgoing& message) { ready_.push_back(&message); }

bool Outbox::credit(Name name) {
  auto found = messages_.find(name);
  if (found == messages_.end()) return early_.insert(name), early_.size() <= (1 << 18);
  Outgoing& m = found->second;
  if (!m.eager && !m.cut && !m.whole && std::find(ready_.begin(), ready_.end(), &m) == ready_.end()) ready(m);
  return true;
}

void Outbox::say(Kind kind, u32 generation, std::vector<WireName> names) {
  const u64 bytes = names.size() * sizeof(WireName);
  Flight& flight = flights_.emplace_back();
  flight.header.kind = kind, flight.header.generation = generation, flight.header.sequence = next_sequence_++;
  flight.header.body = u32(bytes);
  if (bytes) {
    flight.own.reset(new u8[bytes]);
    std::memcpy(flight.own.get(), names.data(), bytes);
    flight.data = flight.own.get();
  }
  control_.push_back(&flight);
}

bool Outbox::has_next() const {
  return !again_.empty() || !control_.empty() || !wants_.empty() ||
         (!ready_.empty() && fits(std::min(FRAGMENT_BYTES, ready_.front()->length - ready_.front()->cut)));
}

u64 Outbox::next_long() const {
  if (!again_.empty() || !control_.empty() || !wants_.empty() || ready_.empty()) return 0;
  const Outgoing& m = *ready_.front();
  return m.length > options_.eager_bytes ? std::min(FRAGMENT_BYTES, m.length - m.cut) : 0;
}

Flight* Outbox::next(u32 generation) {
  for (std::deque<Flight*>* queue : {&again_, &control_}) {
    if (queue->empty()) continue;
    Flight* flight = queue->front();
    queue->pop_front();
    flight->again = false;
    return flight;
  }
  if (!wants_.empty()) {
    const u64 count = std::min<u64>(wants_.size(), NAMES);
    say(Kind::WANT, generation, {wants_.begin(), wants_.begin() + count});
    wants_.erase(wants_.begin(), wants_.begin() + count);
    return next(generation);
  }
  if (ready_.empty()) return nullptr;
  Outgoing& m = *ready_.front();
  const u64 bytes = std::min(FRAGMENT_BYTES, m.length - m.cut);
  if (!fits(bytes)) return nullptr;
  Flight& flight = flights_.emplace_back();
  Header& h = flight.header;
  h.kind = Kind::DATA, h.generation = generation, h.sequence = next_sequence_++;
  h.op = m.name.op, h.index = m.name.index, h.offset = m.cut, h.length = m.length, h.body = u32(bytes);
  flight.data = m.data + m.cut, flight.message = &m;
  m.cut += bytes, m.flying++, bytes_ += bytes;
  m.whole = m.cut == m.length;
  h.flags = (m.eager ? EAGER : 0) | (m.prompt && m.whole ? ACK_ME : 0);
  if (m.whole) ready_.pop_front();
  // The window must not wait for an acknowledgement that the peer has no reason to hurry with.
  if (hops_ || h.sequence % 16 == 0 || bytes_ > options_.window_bytes / 2) h.flags |= ACK_ME;
  return &flight;
}

void Outbox::again(Flight* flight) {
  if (flight->acknowledged || flight->again) return;
  flight->again = true;
  flight->header.flags |= ACK_ME;
  fragments_again++;
  again_.push_back(flight);
}

void Outbox::acknowledge(u64 floor, const u64* ranges, u64 count, std::vector<Flight*>& held, std::vector<Outgoing*>& ended) {
  const u64 newest = next_sequence_ - 1;
  auto each = [&](u64 first, u64 last) {
    for (u64 s = std::max(first, first_); s <= std::min(last, newest); s++) {
      Flight& flight = flights_[s - first_];
      if (!flight.acknowledged) acknowledged(flight, held, ended);
    }
  };
  each(first_, floor);
  for (u64 i = 0; i < count; i++) each(ranges[2 * i], ranges[2 * i + 1]);
}

void Outbox::acknowledged(Flight& flight, std::vector<Flight*>& held, std::vector<Outgoing*>& ended) {
  flight.acknowledged = true;
  if (flight.again) again_.erase(std::find(again_.begin(), again_.end(), &flight)), flight.again = false;
  if (flight.queued) held.push_back(&flight);
  Outgoing* m = flight.message;
  if (!m) return;
  bytes_ -= flight.header.body;
  if (hops_ && m->length > options_.eager_bytes) measured.push_back({flight.rail, flight.header.body, flight.given});
  if (--m->flying == 0 && m->whole) ended.push_back(m);
}

void Outbox::prune() {
  while (!flights_.empty() && flights_.front().acknowledged && !flights_.front().queued) flights_.pop_front(), first_++;
}

void Outbox::keep(Outgoing& m) {
  m.kept.reset(new u8[m.length ? m.length : 1]);
  if (m.length) std::memcpy(m.kept.get(), m.data, m.length);
  m.data = m.kept.get();
  for (Flight& flight : flights_)
    if (flight.message == &m && !flight.acknowledged) flight.data = m.data + flight.header.offset;
  m.owner = nullptr, m.told = true;
}

std::vector<Outgoing*> Outbox::of(const void* owner) {
  std::vector<Outgoing*> found;
  for (auto& [name, message] : messages_)
    if (message.owner == owner) found.push_back(&message);
  return found;
}

bool Outbox::all_cut() const {
  return std::all_of(messages_.begin(), messages_.end(), [](const auto& each) { return each.second.whole; });
}

bool Outbox::unfinished() const {
  return std::any_of(messages_.begin(), messages_.end(), [](const auto& each) { return !each.second.told; });
}

void Outbox::detach() {
  ready_.clear(), again_.clear(), control_.clear(), wants_.clear(), early_.clear();
  flights_.clear(), messages_.clear();
  first_ = next_sequence_, bytes_ = 0;
}
}  // namespace hx
