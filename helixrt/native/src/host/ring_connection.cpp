#include "ring_connection.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace hx {
namespace {
constexpr u64 STEP = 128 << 10;  // published at once, so that the other end copies at the same time

Ring* map(int memory) {
  struct stat about {};
  if (fstat(memory, &about)) throw std::system_error(errno, std::generic_category());
  if (u64(about.st_size) < RingConnection::MEMORY_BYTES) throw std::system_error(EINVAL, std::generic_category());
#ifdef F_ADD_SEALS
  fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK);  // else the peer could make an access a SIGBUS; not all memory can be sealed
#endif
  void* at = mmap(nullptr, RingConnection::MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category());
  return static_cast<Ring*>(at);
}
}  // namespace

RingConnection::RingConnection(Descriptor fd, int memory, bool first, int peer, int rail)
    : Connection(std::move(fd), peer, rail), rings_(map(memory)), in_(rings_.get() + first), out_(rings_.get() + !first) {
  prepare(this->fd());
}

// The store of a position comes before the load of `sleeps`, as the store of `sleeps` comes before the load of the position at
// the other end. All four are sequentially consistent: one of the two sees the other.
void RingConnection::publish(std::atomic<u64>& place, u64 position, std::atomic<u32>& sleeps) const {
  place.store(position);
  if (sleeps.load() && sleeps.exchange(0)) (void)!::send(fd(), "", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

i64 RingConnection::send(const iovec* pieces, int count) {
  if (hung_up_) return 0;  // `receive` tells it
  const u64 used = tail_ - out_->head.load();
  if (used > Ring::BYTES) return -EPROTO;
  const u64 from = tail_, end = tail_ + Ring::BYTES - used;
  u64 published = tail_;
  for (int i = 0; i < count && tail_ != end; i++) {
    const u8* bytes = static_cast<const u8*>(pieces[i].iov_base);
    for (u64 left = std::min<u64>(pieces[i].iov_len, end - tail_); left;) {
      const u64 at = tail_ % Ring::BYTES, n = std::min({left, Ring::BYTES - at, STEP});
      std::memcpy(out_->data + at, bytes, n);
      bytes += n, left -= n, tail_ += n;
      if (tail_ - published >= STEP) publish(out_->tail, published = tail_, out_->reader_sleeps);
    }
  }
  if (tail_ != published) publish(out_->tail, tail_, out_->reader_sleeps);
  return i64(tail_ - from);
}

i64 RingConnection::receive(void* into, std::size_t most) {
  const u64 have = in_->tail.load() - head_;
  if (have > Ring::BYTES) return -EPROTO;
  if (!have) return hung_up_ ? -ECONNRESET : 0;
  u8* bytes = static_cast<u8*>(into);
  const u64 count = std::min<u64>(have, most);
  for (u64 left = count; left;) {
    const u64 at = head_ % Ring::BYTES, n = std::min({left, Ring::BYTES - at, STEP});
    std::memcpy(bytes, in_->data + at, n);
    bytes += n, left -= n, head_ += n;
    publish(in_->head, head_, in_->writer_sleeps);
  }
  return i64(count);
}

bool RingConnection::may_sleep() {
  in_->reader_sleeps.store(1);
  if (wants_write) out_->writer_sleeps.store(1);
  return !has_data() && !(wants_write && has_room());
}
void RingConnection::awake() {
  in_->reader_sleeps.store(0, std::memory_order_relaxed);
  out_->writer_sleeps.store(0, std::memory_order_relaxed);
}
void RingConnection::woken() {
  u8 bells[256];
  const ssize_t n = ::recv(fd(), bells, sizeof bells, MSG_DONTWAIT);
  if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) hung_up_ = true;
}
}  // namespace hx
