// epoll with timeouts in ns, and an event that ends a wait.
#pragma once
#include <sys/epoll.h>

#include <atomic>
#include <span>

#include "../types.hpp"
#include "descriptor.hpp"

namespace hx {
class Poller {
 public:
  static constexpr u64 KICK = ~u64(0);  // the key of `kick`

  Poller();
  i32 add(int fd, u64 key);  // for reading; 0 or -errno
  void change(int fd, u64 key, bool writing);
  void remove(int fd);
  // How many of `into` were filled, or -errno. `ns`: NEVER for no limit.
  int wait(std::span<epoll_event> into, i64 ns);
  void kick();  // ends the wait, or the next one; may be called in a signal handler
  void drain();  // takes a kick back
  int fd() const { return epoll_.get(); }
  void abandon() { epoll_.close(), kick_.close(); }

 private:
  Descriptor epoll_, kick_;
  std::atomic<bool> has_pwait2_{true};
};

Descriptor event_descriptor();  // an eventfd; throws std::system_error
void set_event(int fd);
void clear_event(int fd);
}  // namespace hx
