// A stream of bytes to one peer, as the cores see it. The engine's mutex is held in each call.
#pragma once
#include <sys/uio.h>

#include "../types.hpp"
#include "descriptor.hpp"

namespace hx {
class Connection {
 public:
  Connection(Descriptor fd, int peer, int rail) : peer(peer), rail(rail), fd_(std::move(fd)) {}
  Connection(const Connection&) = delete;
  virtual ~Connection() = default;

  // As in Io. The end of the peer is told by `receive` alone, after all that came before it.
  virtual i64 send(const iovec* pieces, int count) = 0;
  virtual i64 receive(void* into, std::size_t most) = 0;

  // To look without being told costs no system call; for those alone the following is more than a constant.
  virtual bool in_memory() const { return false; }
  virtual bool has_data() const { return true; }  // or an end
  virtual bool has_room() const { return true; }
  virtual bool may_sleep() { return true; }  // from now on the other end wakes us; false: there is something to do first
  virtual void awake() {}                    // that is not needed any more
  virtual void woken() {}                    // the descriptor is ready

  virtual bool delivered() const { return true; }  // closing it now loses nothing that was sent

  int fd() const { return fd_.get(); }
  const int peer, rail;
  bool wants_write = false;

 private:
  Descriptor fd_;
};

void prepare(int fd);  // a stream socket: no blocking, closed on exec; throws std::system_error if it is none
}  // namespace hx
