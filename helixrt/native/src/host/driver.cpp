#include "driver.hpp"

#include <poll.h>
#include <pthread.h>
#include <signal.h>

#include <sstream>

namespace hx {
Driver::Driver(Work& work, TurnMutex& mutex, Poller& poller) : work_(work), mutex_(mutex), poller_(poller) {
  sigset_t all, old;  // signals are for the threads of the caller
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &old);
  try {
    thread_ = std::make_unique<std::thread>([this] { run(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  pthread_setname_np(thread_->native_handle(), "helixrt-engine");
}

void Driver::stop() {
  if (!thread_) return;
  stopping_ = true;
  set_event(call_thread_.get());
  thread_->join();
  thread_.reset();
}

void Driver::abandon() {
  call_thread_.close();
  (void)thread_.release();  // it does not exist in this process; to detach it would write into memory that may be used again
}

// ---------------------------------------------------------------- callers

bool Driver::await(Hold& hold, const std::function<bool()>& done, i64 until) {
  bool undisturbed = true;
  while (undisturbed && !done() && monotonic_ns() < until) {
    if (!driving_) {
      undisturbed = drive(done, until);
      continue;
    }
    sleepers_++;
    const u32 seen = changes_.value();  // no change is missed: each comes with the mutex held
    hold.unlock();
    undisturbed = changes_.wait(seen, until);
    hold.lock();
    sleepers_--;
  }
  if (!driving_) pass_on();
  return undisturbed;
}

void Driver::added(bool caller_follows) {
  if (asleep_) {  // the time when it has to wake may have changed
    figures_.kicks++;
    poller_.kick();
  } else if (!driving_ && !caller_follows) {
    pass_on();
  }
}

void Driver::changed() {
  if (sleepers_) changes_.wake();
}

void Driver::call() {
  poller_.kick();
  set_event(call_thread_.get());
}

// Nobody drives. One of those who wait does so next, or else the thread.
void Driver::pass_on() {
  if (sleepers_) return changes_.wake();
  if (state_ == State::AWAKE || !work_.waits()) return;
  figures_.kicks++;
  set_event(call_thread_.get());
}

bool Driver::drive(const std::function<bool()>& done, i64 until) {
  driving_ = true;
  if (state_ == State::WATCHING) {  // it would wake at each arrival
    work_.awake();
    figures_.kicks++;
    set_event(call_thread_.get());
  }
  bool undisturbed = true;
  const i64 from = monotonic_ns();
  for (i64 now = from, idle = 0; undisturbed && !done() && now < until;) {
    const i64 before = now;
    const bool came = turn(now);
    now = monotonic_ns();
    if (came) {
      if (idle) spin_.learn(now - idle);
      idle = 0;
    } else {
      if (!idle) idle = before;
      figures_.spins_ns += now - before;
      if (done()) break;
      if (now - idle < spin_.limit_ns())
        pause_cpu();
      else
        undisturbed = sleep(until), now = monotonic_ns();
    }
    mutex_.make_room();
  }
  driving_ = false;
  drove_at_ = monotonic_ns();
  figures_.driven_ns += drove_at_ - from;
  return undisturbed;
}

bool Driver::turn(i64 now) {
  figures_.turns++, figures_.caller_turns += driving_;
  const bool few = work_.sockets() <= FEW;
  if (!found_count_ && (look_ || !few || figures_.turns % 64 == 0)) {
    found_count_ = std::max(0, poller_.wait(found_, 0));
    figures_.system_calls++;
  }
  look_ = false;
  const std::span<const epoll_event> ready(found_.data(), std::size_t(std::exchange(found_count_, 0)));
  for (const epoll_event& event : ready)
    if (event.data.u64 == Poller::KICK) poller_.drain();
  return work_.turn(now, ready, few && ready.empty());
}

bool Driver::sleep(i64 until) {
  const bool may = work_.may_sleep();
  const i64 ns = std::min(until, work_.due());
  int found = 0;
  if (may && ns > 0) {
    asleep_ = true;
    figures_.sleeps++, figures_.system_calls++;
    mutex_.unlock();
    found = poller_.wait(found_, ns == NEVER ? NEVER : std::max<i64>(0, ns - monotonic_ns()));
    mutex_.lock();
    asleep_ = false;
  }
  work_.awake();
  found_count_ = std::max(0, found);
  return found != -EINTR;
}

// ---------------------------------------------------------------- the thread

void Driver::run() {
  mutex_.lock_last();
  for (i64 idle = 0; !stopping_;) {
    const i64 now = monotonic_ns();
    const bool park = driving_ || (now - drove_at_ < PARK && !work_.waits());
    if (!park) {
      const bool came = turn(now);
      if (came || !idle) idle = came ? 0 : now;
      if (came || (work_.waits() && now - idle < Spin::LEAST)) {
        mutex_.make_room();
        continue;
      }
    }
    idle = 0;
    thread_sleep(park);
  }
  mutex_.unlock();
}

void Driver::thread_sleep(bool park) {
  if (!park && !work_.may_sleep()) return work_.awake();
  i64 until = park ? later(monotonic_ns(), PARK) : NEVER;
  until = driving_ ? until : std::min(until, work_.due());
  state_ = park ? State::PARKED : State::WATCHING;
  figures_.sleeps++, figures_.system_calls++;
  mutex_.unlock();
  do {
    // It never takes events from epoll while it does not hold the mutex: they, and kicks, are for the caller that drives.
    pollfd fds[] = {{call_thread_.get(), POLLIN, 0}, {poller_.fd(), POLLIN, 0}};
    const timespec t = duration(std::max<i64>(0, until - monotonic_ns()));
    ppoll(fds, park ? 1 : 2, until == NEVER ? nullptr : &t, nullptr);
    if (fds[0].revents) clear_event(call_thread_.get());
    park = true, until = later(monotonic_ns(), PARK);
  } while (driving_ && !stopping_);
  mutex_.lock_last();
  state_ = State::AWAKE;
  if (!driving_) work_.awake();  // else it is not the thread that sleeps
  look_ = true;
}

std::string Driver::print() const {
  std::ostringstream text;
  text << (driving_ ? "a caller drives" : "no caller drives") << (asleep_ ? " and sleeps" : "") << ", " << sleepers_
       << " wait beside it, the thread is " << (state_ == State::AWAKE ? "awake" : state_ == State::PARKED ? "parked" : "watching")
       << ", " << figures_.turns << " turns\n";
  return text.str();
}
}  // namespace hx
