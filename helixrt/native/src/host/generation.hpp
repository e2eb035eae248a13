// One generation: its core, and the connections that the core uses. The engine's mutex is held in each call.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "../core.hpp"
#include "connection.hpp"
#include "poller.hpp"

namespace hx {
class Generation final : private Io {
 public:
  struct Owner {
    virtual void happened(Generation& generation, Report&& report) = 0;
    virtual void broke(Generation& generation, const char* why) = 0;  // the core failed (no memory): it is not called again
    virtual void closed() = 0;                                       // all connections are

   protected:
    ~Owner() = default;
  };

  // `serial`: not that of another generation of this engine. `first_operation`: what the core calls operation 0.
  Generation(Owner& owner, Poller& poller, const Options& options, u32 serial, i64 first_operation, u32 generation, int me,
             const std::vector<int>& rails);
  ~Generation() override;

  // Every use of the core that changes it: `work` tells whether it did.
  void use(const std::function<bool(Core&)>& work);
  const Core& core() const { return core_; }

  i32 add(std::unique_ptr<Connection> connection, u32 number);  // 0 or -errno
  // Reads and writes where `ready` says so, at connections in memory, and at sockets if `all`. False: nothing came.
  bool turn(i64 now, std::span<const epoll_event> ready, bool all);
  int sockets() const { return sockets_; }
  bool may_sleep();  // false: something has come
  void awake();
  i64 due() const;

  bool waits() const;  // for something that should not be late
  bool open() const { return close_by_ == NEVER; }  // for new work
  void end(i64 by);    // connections are closed at that time, or when all is written
  bool closed() const { return closed_; }
  bool all_said() const { return all_said_; }  // before they were closed
  void abandon();  // in a child after a fork: closes copies, and leaves those of the parent as they are

  const u32 serial;
  const i64 first_operation;
  i64 messages = 0;  // single ones that have no event yet
  i64 system_calls = 0;

 private:
  i64 now() override;
  i64 send(int connection, const iovec* pieces, int count) override;
  i64 receive(int connection, void* into, std::size_t most) override;
  void want_write(int connection, bool yes) override;
  void close(int connection) override;
  void report(Report&& report) override;

  u64 key(std::size_t id) const { return u64(serial) << 32 | id; }
  void look(std::size_t id, bool read, bool write);
  void settle();
  void close_all();

  Owner& owner_;
  Poller& poller_;
  std::vector<std::unique_ptr<Connection>> connections_;  // never grows: a forked child may copy it at any time
  int sockets_ = 0;
  u64 progress_ = 0;  // calls that moved bytes, or failed
  i64 due_ = 0, close_by_ = NEVER;
  bool closed_ = false, all_said_ = false, broken_ = false;
  Core core_;
};
}  // namespace hx
