#include "generation.hpp"

#include <sys/socket.h>

#include <cerrno>
#include <exception>
#include <numeric>

#include "waiting.hpp"

namespace hx {
Generation::Generation(Owner& owner, Poller& poller, const Options& options, u32 serial, i64 first_operation, u32 generation, int me,
                       const std::vector<int>& rails)
    : serial(serial), first_operation(first_operation), owner_(owner), poller_(poller),
      connections_(2 * std::size_t(std::accumulate(rails.begin(), rails.end(), 0)) + 1), core_(*this, options, generation, me, rails) {
  due_ = core_.due();
}
Generation::~Generation() { close_all(); }

void Generation::use(const std::function<bool(Core&)>& work) {
  if (broken_) return;
  try {
    if (!work(core_)) return;
    core_.flush();
    due_ = core_.due();
  } catch (const std::exception& error) {
    broken_ = true, close_by_ = 0;
    owner_.broke(*this, error.what());
    close_all();
  }
  settle();
}

// ---------------------------------------------------------------- connections

i32 Generation::add(std::unique_ptr<Connection> connection, u32 number) {
  std::size_t id = 0;
  while (id < connections_.size() && connections_[id]) id++;
  if (id == connections_.size()) return -ENOBUFS;
  if (const i32 error = poller_.add(connection->fd(), key(id))) return error;
  const int peer = connection->peer, rail = connection->rail;
  sockets_ += !connection->in_memory();
  connections_[id] = std::move(connection);
  use([=](Core& core) { return core.rail_up(peer, rail, int(id), number), true; });
  return 0;
}

void Generation::close(int connection) {
  std::unique_ptr<Connection>& each = connections_[std::size_t(connection)];
  if (!each) return;
  poller_.remove(each->fd());         // a forked child may have a copy, which would keep it there,
  ::shutdown(each->fd(), SHUT_RDWR);  // and open at the peer
  sockets_ -= !each->in_memory();
  each.reset();
}

void Generation::close_all() {
  if (closed_) return;
  closed_ = true;
  for (std::size_t id = 0; id < connections_.size(); id++) close(int(id));
  owner_.closed();
}

void Generation::abandon() {
  for (auto& each : connections_) each.reset();
}

void Generation::look(std::size_t id, bool read, bool write) {
  const int peer = connections_[id]->peer, rail = connections_[id]->rail;
  if (read) core_.readable(peer, rail);
  if (write && connections_[id] && connections_[id]->wants_write) core_.writable(peer, rail);
}

bool Generation::turn(i64 now, std::span<const epoll_event> ready, bool all) {
  if (closed_) return false;
  const u64 before = progress_;
  use([&](Core& core) {
    for (const epoll_event& event : ready) {
      const std::size_t id = u32(event.data.u64);
      if (event.data.u64 >> 32 != serial || id >= connections_.size() || !connections_[id]) continue;
      if (connections_[id]->in_memory())
        connections_[id]->woken();
      else
        look(id, event.events & ~u32(EPOLLOUT), event.events & EPOLLOUT);
    }
    for (std::size_t id = 0; id < connections_.size(); id++) {
      const Connection* each = connections_[id].get();
      if (each && (each->in_memory() || all)) look(id, each->has_data(), each->has_room());
    }
    if (now < due_) return progress_ != before;
    core.tick();
    return true;
  });
  if (close_by_ != NEVER) settle();
  return progress_ != before;
}

bool Generation::may_sleep() {
  bool may = true;
  for (auto& each : connections_)
    if (each) may &= each->may_sleep();
  return may;
}
void Generation::awake() {
  for (auto& each : connections_)
    if (each) each->awake();
}

// ---------------------------------------------------------------- ends

void Generation::end(i64 by) { close_by_ = std::min(close_by_, by); }

void Generation::settle() {
  if (close_by_ == NEVER || closed_) return;
  all_said_ = !core_.unsaid();
  for (auto& each : connections_) all_said_ &= !each || each->delivered();
  if (all_said_ || monotonic_ns() >= close_by_) close_all();
}

i64 Generation::due() const {
  if (closed_) return NEVER;
  // Nothing tells when a socket has delivered what it took.
  return close_by_ == NEVER ? due_ : std::min({due_, close_by_, later(monotonic_ns(), MILLISECOND)});
}

bool Generation::waits() const {
  if (closed_) return false;
  if (close_by_ != NEVER || messages > 0 || core_.running()) return true;
  for (auto& each : connections_)
    if (each && each->wants_write) return true;
  return false;
}

// ---------------------------------------------------------------- Io

i64 Generation::now() { return monotonic_ns(); }

i64 Generation::send(int connection, const iovec* pieces, int count) {
  Connection* each = connections_[std::size_t(connection)].get();
  if (!each) return -ECONNRESET;
  system_calls += !each->in_memory();
  const i64 n = each->send(pieces, count);
  progress_ += n != 0;
  return n;
}
i64 Generation::receive(int connection, void* into, std::size_t most) {
  Connection* each = connections_[std::size_t(connection)].get();
  if (!each) return -ECONNRESET;
  system_calls += !each->in_memory();
  const i64 n = each->receive(into, most);
  progress_ += n != 0;
  return n;
}
void Generation::want_write(int connection, bool yes) {
  Connection* each = connections_[std::size_t(connection)].get();
  if (!each || each->wants_write == yes) return;
  each->wants_write = yes;
  if (!each->in_memory()) poller_.change(each->fd(), key(std::size_t(connection)), yes);
}
void Generation::report(Report&& report) {
  if (report.event == Event::SENT || report.event == Event::RECEIVED) messages--;
  if (report.event == Event::ENDED) {
    messages = 0;
    end(later(monotonic_ns(), SECOND));
  }
  owner_.happened(*this, std::move(report));
}
}  // namespace hx
