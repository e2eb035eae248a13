#include "stream.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace hx {
// ---------------------------------------------------------------- reading

i64 Stream::read(Frames& to) {
  i64 came = 0;
  while (u64(came) < options_.turn_bytes) {
    u8* into;
    u64 most;
    if (inside_) {
      inbox_.target(partial_, position_, header_.body - position_, into, most);
      most = std::min(most, PIECE);
    } else {
      if (from_ == to_) from_ = to_ = 0;
      if (from_ && limit_ < to_ + LITTLE) {
        std::memmove(ahead_.get(), ahead_.get() + from_, to_ - from_);
        to_ -= from_, from_ = 0;
      }
      into = ahead_.get() + to_;
      most = std::max(limit_, to_ + LITTLE) - to_;
      most = std::min(most, AHEAD + LITTLE - to_);
    }
    const i64 n = io_.receive(connection, into, most);
    if (n < 0) return n;
    if (!n) break;
    came += n, bytes_received += n;
    if (inside_)
      took(to, n);
    else
      to_ += n;
    if (!inside_ && (to.stopped() || !parse(to))) break;
    if (u64(n) < most) break;
  }
  return came;
}

bool Stream::parse(Frames& to) {
  while (to_ - from_ >= sizeof(Header)) {
    Header h;
    std::memcpy(&h, ahead_.get() + from_, sizeof h);
    const bool data = h.kind == Kind::DATA;
    if (h.magic != MAGIC || h.kind == Kind::NONE || h.kind >= Kind::KINDS || h.body > (data ? FRAGMENT_BYTES : CONTROL_BYTES))
      return to.garbage("no frame of a peer"), false;
    if (!data && to_ - from_ < sizeof h + h.body) return true;
    from_ += sizeof h;
    frames_received++;
    if (!data) {
      const u8* body = ahead_.get() + from_;
      from_ += h.body;
      to.frame(h, body);
      if (to.stopped()) return false;
      continue;
    }
    limit_ = h.body > LONG ? LITTLE : AHEAD;
    header_ = h, position_ = 0, inside_ = true;
    partial_ = to.fragment(h);
    if (to.stopped()) return false;
    do {
      u8* into;
      u64 most;
      inbox_.target(partial_, position_, h.body - position_, into, most);
      const u64 n = std::min(most, to_ - from_);
      std::memcpy(into, ahead_.get() + from_, n);
      from_ += n;
      took(to, n);
    } while (inside_ && to_ > from_);
    if (inside_) return true;
    if (to.stopped()) return false;
  }
  return true;
}

void Stream::took(Frames& to, u64 bytes) {
  if (bytes) inbox_.took(partial_, position_, bytes);
  position_ += bytes;
  if (position_ < header_.body) return;
  inside_ = false;
  to.fragment_ended(header_, std::exchange(partial_, nullptr));
}

void Stream::leave() {
  if (inside_) inbox_.leave(std::exchange(partial_, nullptr), header_.sequence);
  inside_ = false;
}

// ---------------------------------------------------------------- writing

void Stream::say(const Header& header, const void* body) {
  const u8* bytes = reinterpret_cast<const u8*>(&header);
  words_.insert(words_.end(), bytes, bytes + sizeof header);
  if (header.body) words_.insert(words_.end(), static_cast<const u8*>(body), static_cast<const u8*>(body) + header.body);
  frames_sent++;
}

void Stream::give(Flight* flight) {
  flight->queued = true;
  queue_.push_back(flight);
  queued_ += sizeof(Header) + flight->header.body;
}

void Stream::detach_front() {  // words are written between fragments, so none of them is partly written now
  Flight& flight = *queue_.front();
  std::vector<u8> rest;
  const u8* header = reinterpret_cast<const u8*>(&flight.header);
  if (front_written_ < sizeof(Header)) rest.assign(header + front_written_, header + sizeof(Header));
  const u64 at = front_written_ > sizeof(Header) ? front_written_ - sizeof(Header) : 0;
  if (flight.header.body) rest.insert(rest.end(), flight.data + at, flight.data + flight.header.body);
  words_.erase(words_.begin(), words_.begin() + words_written_);
  words_.insert(words_.begin(), rest.begin(), rest.end());
  words_written_ = 0;
}

void Stream::let_go(Flight* flight) {
  auto found = std::find(queue_.begin(), queue_.end(), flight);
  if (found == queue_.end()) return;
  queued_ -= sizeof(Header) + flight->header.body;
  if (found == queue_.begin()) {
    if (front_written_) detach_front();
    front_written_ = 0;
  }
  flight->queued = false;
  queue_.erase(found);
}

void Stream::cut() {
  if (front_written_) detach_front();
  for (Flight* flight : queue_) flight->queued = false;
  queue_.clear();
  front_written_ = queued_ = 0;
}

i64 Stream::write(u64 floor) {
  i64 done = 0;
  while (u64(done) < options_.turn_bytes) {
    iovec pieces[32];
    int count = 0;
    u64 total = 0, words = 0;
    if (words_written_ < words_.size() && !front_written_) {
      words = total = words_.size() - words_written_;
      pieces[count++] = {words_.data() + words_written_, words};
    }
    u64 written = front_written_;
    for (auto each = queue_.begin(); each != queue_.end() && count < 30 && total < GATHER; ++each, written = 0) {
      Flight& flight = **each;
      if (!written) flight.header.floor = floor;
      if (written < sizeof(Header)) {
        pieces[count++] = {reinterpret_cast<u8*>(&flight.header) + written, sizeof(Header) - written};
        total += sizeof(Header) - written;
      }
      const u64 at = written > sizeof(Header) ? written - sizeof(Header) : 0, rest = flight.header.body - at;
      const u64 n = std::min(rest, std::max<u64>(GATHER - std::min(total, GATHER), 4096));
      if (n) pieces[count++] = {const_cast<u8*>(flight.data) + at, n};
      total += n;
      if (n < rest) break;
    }
    if (!count) break;
    const i64 taken = io_.send(connection, pieces, count);
    if (taken < 0) return taken;
    if (!taken) break;
    done += taken, bytes_sent += taken;
    u64 n = taken;
    const u64 said = std::min(n, words);
    words_written_ += said, n -= said;
    if (words_written_ == words_.size()) words_.clear(), words_written_ = 0;
    while (n) {
      const u64 step = std::min(n, front_bytes() - front_written_);
      front_written_ += step, n -= step;
      if (front_written_ < front_bytes()) break;
      queued_ -= front_bytes();
      floor_said = queue_.front()->header.floor;
      queue_.front()->queued = false;
      queue_.pop_front();
      front_written_ = 0, frames_sent++;
    }
    if (u64(taken) < total) break;
  }
  return done;
}
}  // namespace hx
