// Who drives an engine: takes turns, spins a little when nothing comes, sleeps in epoll.
//
// At most one caller drives at a time, one that waits; a call then costs no change of thread. Other callers that wait sleep until
// it stops or something changes. The thread drives while no caller does: at once if something is waited for, else some ms after
// the last caller stopped, so that one who comes back soon need not wake it.
#pragma once
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>

#include "helixrt_native.h"
#include "poller.hpp"
#include "waiting.hpp"

namespace hx {
class Driver {
 public:
  struct Work {  // called with the mutex held
    // Looks at what `ready` says; at what costs no system call; at all sockets if `all`. False: nothing came.
    virtual bool turn(i64 now, std::span<const epoll_event> ready, bool all) = 0;
    virtual int sockets() const = 0;
    virtual i64 due() const = 0;    // a turn is needed at that time
    virtual bool waits() const = 0;  // for something that should not be late
    virtual bool may_sleep() = 0;   // from now on `poller` tells what comes; false: something has come
    virtual void awake() = 0;       // that is not needed any more

   protected:
    ~Work() = default;
  };
  using Hold = std::unique_lock<TurnMutex>;

  Driver(Work& work, TurnMutex& mutex, Poller& poller);  // starts the thread; throws std::system_error
  ~Driver() { stop(); }
  void stop();  // ends the thread; nobody waits

  // Until `done`, or `until`. False: a signal came, and its handler has run; a signal that comes while the caller does not sleep
  // is not noticed. `hold` is held when it is called and when it returns.
  bool await(Hold& hold, const std::function<bool()>& done, i64 until);
  void added(bool caller_follows);  // there is more work; a caller that follows awaits at once. With the mutex held
  void changed();                   // those who await should look again. With the mutex held
  void call();                      // there is more work; may be called in a signal handler

  void abandon();  // in a child after a fork, instead of the destructor
  const hx_loop_counters& figures() const { return figures_; }  // with the mutex held
  std::string print() const;

 private:
  enum class State { AWAKE, PARKED, WATCHING };  // of the thread; PARKED: until it is called; WATCHING: also until something comes
  static constexpr i64 PARK = 20 * MILLISECOND;
  static constexpr int FEW = 3;  // sockets; to try to read from each is cheaper than to ask first

  bool drive(const std::function<bool()>& done, i64 until);
  bool turn(i64 now);
  bool sleep(i64 until);
  void pass_on();
  void run();
  void thread_sleep(bool park);

  Work& work_;
  TurnMutex& mutex_;
  Poller& poller_;
  std::atomic<bool> driving_{false};  // a caller does
  bool asleep_ = false;               // and is in epoll
  int sleepers_ = 0;                  // callers that wait beside it
  Changes changes_;                   // for them
  i64 drove_at_ = 0;
  Spin spin_;
  std::array<epoll_event, 64> found_;  // by the last sleep
  int found_count_ = 0;
  bool look_ = false;  // the next turn asks epoll
  hx_loop_counters figures_{};

  std::atomic<State> state_{State::AWAKE};
  std::atomic<bool> stopping_{false};
  Descriptor call_thread_ = event_descriptor();
  std::unique_ptr<std::thread> thread_;
};
}  // namespace hx
