// A connection over a stream socket: TCP, or a socket pair.
#pragma once
#include "connection.hpp"

namespace hx {
class SocketConnection final : public Connection {
 public:
  SocketConnection(Descriptor fd, int peer, int rail);
  i64 send(const iovec* pieces, int count) override;
  i64 receive(void* into, std::size_t most) override;
  bool delivered() const override;

 private:
  i32 error_ = 0;  // of sending, until all that had come is read
  bool tcp_ = false;
};
}  // namespace hx
