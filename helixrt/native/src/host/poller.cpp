#include "poller.hpp"

#include <sys/eventfd.h>

#include <system_error>

#include "waiting.hpp"

namespace hx {
namespace {
constexpr long EPOLL_PWAIT2 = 441;  // on all architectures; not in the headers of old systems

int checked(int fd) {
  if (fd < 0) throw std::system_error(errno, std::generic_category());
  return fd;
}
}  // namespace

Descriptor event_descriptor() { return Descriptor(checked(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC))); }
void set_event(int fd) {
  const u64 one = 1;
  (void)!::write(fd, &one, sizeof one);
}
void clear_event(int fd) {
  u64 count;
  (void)!::read(fd, &count, sizeof count);
}

Poller::Poller() : epoll_(checked(epoll_create1(EPOLL_CLOEXEC))), kick_(event_descriptor()) {
  if (const i32 error = add(kick_.get(), KICK)) throw std::system_error(-error, std::generic_category());
}

i32 Poller::add(int fd, u64 key) {
  epoll_event event{EPOLLIN, {.u64 = key}};
  return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) ? -errno : 0;
}
void Poller::change(int fd, u64 key, bool writing) {
  epoll_event event{writing ? u32(EPOLLIN | EPOLLOUT) : u32(EPOLLIN), {.u64 = key}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}
void Poller::remove(int fd) {
  epoll_event unused{};
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, &unused);
}

int Poller::wait(std::span<epoll_event> into, i64 ns) {
  if (ns > 0 && has_pwait2_) {
    const timespec t = duration(ns);
    const long n = syscall(EPOLL_PWAIT2, epoll_.get(), into.data(), int(into.size()), ns == NEVER ? nullptr : &t, nullptr, 0);
    if (n >= 0 || (errno != ENOSYS && errno != EPERM)) return n >= 0 ? int(n) : -errno;  // EPERM: an old sandbox
    has_pwait2_ = false;
  }
  const i64 ms = ns <= 0 ? 0 : ns == NEVER ? -1 : std::min<i64>((ns - 1) / MILLISECOND + 1, INT_MAX);
  const int n = epoll_wait(epoll_.get(), into.data(), int(into.size()), int(ms));
  return n >= 0 ? n : -errno;
}

void Poller::kick() { set_event(kick_.get()); }
void Poller::drain() { clear_event(kick_.get()); }
}  // namespace hx
