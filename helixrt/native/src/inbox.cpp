#include "inbox.hpp"

#include <algorithm>
#include <cstring>

namespace hx {
namespace {
std::string differs(Name name, u64 bytes, u64 expected) {
  return "message (" + std::to_string(name.op) + ", " + std::to_string(name.index) + ") of " + std::to_string(bytes) + " bytes, and " +
         std::to_string(expected) + " were expected";
}
}  // namespace

Inbox::Posted Inbox::post(Incoming&& wanted, std::string& why) {
  auto [found, fresh] = messages_.try_emplace(wanted.name);
  Incoming& message = found->second;
  if (!fresh && message.posted) return why = "a message was asked for twice", Posted::WAITS;
  if (!fresh && message.length != wanted.length) {
    why = differs(wanted.name, message.length, wanted.length);
    return Posted::WAITS;
  }
  posted_++;
  if (fresh) {
    message = std::move(wanted);
    message.posted = true;
    message.missing = message.length;
    return message.length > options_.eager_bytes || wanted_.erase(message.name) ? Posted::CREDIT : Posted::WAITS;
  }
  message.into = wanted.into, message.left = wanted.left, message.reduction = wanted.reduction, message.last = wanted.last;
  message.owner = wanted.owner, message.node = wanted.node, message.posted = true;
  early_ -= message.eager;
  if (message.missing) return Posted::WAITS;
  deliver(message);
  return Posted::WHOLE;
}

bool Inbox::want(Name name) {
  auto found = messages_.find(name);
  if (found != messages_.end() && found->second.posted) return true;
  if (wanted_.size() < (1 << 16)) wanted_.insert(name);
  return false;
}

Partial* Inbox::begin(const Header& h, std::string& why) {
  if (ledger.has(h.sequence)) return duplicates++, nullptr;
  auto known = partials_.find(h.sequence);
  if (known != partials_.end()) {
    if (known->second.bytes != h.body) return why = "a fragment that differs when it comes again", nullptr;
    return duplicates++, known->second.readers++, &known->second;
  }
  const Name name{h.op, h.index};
  if (h.length > MESSAGE_BYTES || h.offset % FRAGMENT_BYTES || h.offset > h.length ||
      h.body != std::min(FRAGMENT_BYTES, h.length - h.offset))
    return why = "a fragment that no message has", nullptr;
  auto found = messages_.find(name);
  if (found == messages_.end()) {
    if (!(h.flags & EAGER) || h.length > options_.eager_bytes) return why = "a message that was not asked for", nullptr;
    if (early_ + h.length > options_.eager_memory) return why = "more early messages than there is memory for", nullptr;
    found = messages_.try_emplace(name).first;
    Incoming& early = found->second;
    early.name = name, early.length = early.missing = h.length;
    early.held.reset(new u8[h.length]);
    early_ += h.length;
  }
  Incoming& message = found->second;
  if (message.length != h.length) {
    why = differs(name, h.length, message.length);
    return nullptr;
  }
  if (h.flags & EAGER) message.eager = h.length;
  Partial& partial = partials_[h.sequence];
  partial.message = &message, partial.offset = h.offset, partial.bytes = h.body, partial.readers = 1;
  return &partial;
}

void Inbox::target(Partial* p, u64 position, u64 left, u8*& into, u64& most) {
  into = stage_.get();
  most = std::min(left, STAGE);
  if (!p || !p->message || p->whole) return;
  if (position < p->taken) {
    most = std::min(most, p->taken - position);
  } else if (Incoming& m = *p->message; m.held) {
    into = m.held.get() + p->offset + p->taken, most = left;
  } else if (!m.left) {
    into = m.into + p->offset + p->taken, most = left;
  } else {  // the stage is shared by all rails: less than an element, which is carried over, is kept in the fragment
    into += p->carry, most = std::min(left, STAGE - p->carry);
  }
}

void Inbox::took(Partial* p, u64 position, u64 bytes) {
  if (!p || !p->message || p->whole || position < p->taken) return;
  Incoming& m = *p->message;
  p->taken += bytes;
  if (m.held || !m.left) return;
  const u64 element = element_bytes(m.reduction->dtype), have = p->carry + bytes, use = have / element * element;
  const u64 at = p->offset + p->taken - have;
  std::memcpy(stage_.get(), p->rest, p->carry);
  m.reduction->apply(m.into + at, m.left + at, stage_.get(), use / element, m.last);
  p->carry = u32(have - use);
  std::memcpy(p->rest, stage_.get() + use, p->carry);
}

Incoming* Inbox::end(Partial* p, u64 sequence) {
  if (!p) return nullptr;
  p->readers--;
  if (p->whole || p->taken < p->bytes) return drop(sequence, *p), nullptr;
  p->whole = true;
  ledger.take(sequence);
  Incoming* m = p->message;
  if (m) m->missing -= p->bytes;
  drop(sequence, *p);
  if (!m || m->missing || !m->posted) return nullptr;
  deliver(*m);
  return m;
}

void Inbox::leave(Partial* p, u64 sequence) {
  if (!p) return;
  p->readers--;
  drop(sequence, *p);
}

void Inbox::drop(u64 sequence, Partial& p) {
  if (!p.readers && p.whole) partials_.erase(sequence);
}

void Inbox::deliver(Incoming& m) {
  posted_--;
  consumed += m.eager;
  if (!m.held || !m.length) return;
  if (m.left)
    m.reduction->apply(m.into, m.left, m.held.get(), m.length / element_bytes(m.reduction->dtype), m.last);
  else
    std::memcpy(m.into, m.held.get(), m.length);
}

void Inbox::detach() {
  for (auto& [sequence, partial] : partials_) partial.message = nullptr;
  messages_.clear();
  wanted_.clear();
  posted_ = 0;
}
}  // namespace hx
