// Waiting in one process: the clock, a futex word, the mutex of the engine, and for how long to spin.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <mutex>

#include "../types.hpp"

namespace hx {
constexpr i64 MICROSECOND = 1'000, MILLISECOND = 1'000'000, SECOND = 1'000'000'000;

inline i64 monotonic_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * SECOND + t.tv_nsec;
}
inline timespec duration(i64 ns) { return {ns / SECOND, ns % SECOND}; }
inline i64 later(i64 time, i64 ns) { return ns > NEVER - time ? NEVER : time + ns; }

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// A count that changes whenever those who sleep on it have to look again. A plain futex, since a condition variable does not
// return when a signal comes.
class Changes {
 public:
  u32 value() const { return count_.load(); }
  void wake() {
    count_.fetch_add(1);
    syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
  // Until the value is not `seen` any more, or `until`, or without a reason; false: a signal came.
  bool wait(u32 seen, i64 until) {
    const timespec t = duration(std::clamp<i64>(until - monotonic_ns(), 0, SECOND));  // a limit makes each signal end it
    return syscall(SYS_futex, &count_, FUTEX_WAIT_PRIVATE, seen, &t, nullptr, 0) == 0 || errno != EINTR;
  }

 private:
  std::atomic<u32> count_{0};
  static_assert(sizeof(count_) == 4 && std::atomic<u32>::is_always_lock_free);
};

// A mutex whose owner can see that others want it. Who drives the engine holds it for many turns on end; a plain mutex would
// starve the others, since it is not fair.
class TurnMutex {
 public:
  void lock() {
    wanted_.fetch_add(1, std::memory_order_relaxed);
    mutex_.lock();
    wanted_.fetch_sub(1, std::memory_order_relaxed);
  }
  void lock_last() { mutex_.lock(); }  // of who can wait: the owner makes no room for it
  void unlock() { mutex_.unlock(); }
  void make_room() {  // between two turns
    if (!wanted_.load(std::memory_order_relaxed)) return;
    mutex_.unlock();
    for (const i64 from = monotonic_ns(); wanted_.load(std::memory_order_relaxed) && monotonic_ns() - from < 100 * MICROSECOND;)
      sched_yield();
    mutex_.lock();
  }

 private:
  std::mutex mutex_;
  std::atomic<int> wanted_{0};
};

// How long to look for something to come before sleeping: a sleep costs some 10 us of latency, so that spinning is worth while
// only if waits are usually short.
class Spin {
 public:
  static constexpr i64 LEAST = 5 * MICROSECOND, WORTH = 50 * MICROSECOND, MOST = MILLISECOND;
  i64 limit_ns() const { return average_ns_ < WORTH ? 2 * WORTH : LEAST; }
  void learn(i64 waited_ns) { average_ns_ += (std::min(waited_ns, MOST) - average_ns_) / 8; }

 private:
  i64 average_ns_ = 20 * MICROSECOND;
};
}  // namespace hx
