// A connection through memory that two processes share: a ring of bytes each way. A socket pair wakes the other end, by one byte
// and only if it said that it sleeps; its hang-up is the end of the peer.
#pragma once
#include <sys/mman.h>

#include <atomic>
#include <memory>

#include "connection.hpp"

namespace hx {
struct Ring {  // one writes, the other reads; zeroed at first
  static constexpr u64 BYTES = 2 << 20;
  alignas(64) std::atomic<u64> tail;  // bytes written so far
  std::atomic<u32> writer_sleeps;     // until there is room
  alignas(64) std::atomic<u64> head;  // bytes read so far
  std::atomic<u32> reader_sleeps;
  alignas(4096) u8 data[BYTES];
  static_assert(std::atomic<u64>::is_always_lock_free && std::atomic<u32>::is_always_lock_free);
};

// The other process may write anything into the memory: positions of our own are kept outside of it, those of the peer are
// checked at each use.
class RingConnection final : public Connection {
 public:
  static constexpr u64 MEMORY_BYTES = 2 * sizeof(Ring);

  // `memory`: a descriptor, needed in this call alone. Throws std::system_error.
  RingConnection(Descriptor fd, int memory, bool first, int peer, int rail);
  i64 send(const iovec* pieces, int count) override;
  i64 receive(void* into, std::size_t most) override;
  bool in_memory() const override { return true; }
  bool has_data() const override { return hung_up_ || in_->tail.load() != head_; }
  bool has_room() const override { return tail_ - out_->head.load() != Ring::BYTES; }
  bool may_sleep() override;
  void awake() override;
  void woken() override;

 private:
  struct Unmap {
    void operator()(Ring* rings) const { munmap(rings, MEMORY_BYTES); }
  };
  void publish(std::atomic<u64>& place, u64 position, std::atomic<u32>& sleeps) const;

  std::unique_ptr<Ring, Unmap> rings_;
  Ring *in_, *out_;
  u64 head_ = 0, tail_ = 0;  // of in_, of out_
  bool hung_up_ = false;
};
}  // namespace hx
