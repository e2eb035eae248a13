// The engine behind the C ABI: generations, operations, plans and events, under one mutex.
#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "driver.hpp"
#include "events.hpp"
#include "generation.hpp"
#include "plans.hpp"
#include "statuses.hpp"

namespace hx {
class Engine final : private Generation::Owner, private Driver::Work {
 public:
  explicit Engine(const Options& options);  // throws std::system_error
  ~Engine();
  void abandon();  // in a child after a fork, instead of the destructor: its memory may be a copy of the middle of a change

  // As the functions of the C ABI, whose arguments are plausible. They may throw.
  void begin(u32 generation, int me, const std::vector<int>& rails);
  i32 rail_up(std::unique_ptr<Connection> connection, u32 number);
  i32 with_rail(int peer, int rail, const std::function<void(Core&)>& work);
  void abort(const char* cause);
  void abort_signal();
  i32 finish(i64 linger);
  i64 add_plan(std::unique_ptr<const Plan> plan, int size);
  i32 remove_plan(i64 plan);
  i64 submit(const hx_call& call);
  i32 wait(i64 operation, i64 timeout);
  i32 status(i64 operation) const { return statuses_.get(operation); }
  void node_done(i64 operation, i32 node);
  i32 message(int peer, const std::function<bool(Core&)>& post);
  i32 events(hx_event* into, i32 most);
  i32 ended(hx_event* into);
  int event_fd() const { return events_.fd(); }
  void announce(bool yes);
  i32 counters(int peer, int rail, hx_rail_counters* into);
  void loop(hx_loop_counters* into);
  std::string print();

 private:
  using Hold = Driver::Hold;

  // Generation::Owner
  void happened(Generation& generation, Report&& report) override;
  void broke(Generation& generation, const char* why) override;
  void closed() override { driver_.changed(); }
  // Driver::Work
  bool turn(i64 now, std::span<const epoll_event> ready, bool all) override;
  int sockets() const override;
  i64 due() const override;
  bool waits() const override;
  bool may_sleep() override;
  void awake() override;

  void end_operation(i64 operation, Status status);
  void fail_rest();
  void stop(Generation& generation, std::string_view cause);
  void retire(std::unique_ptr<Generation>& generation);

  const Options options_;
  TurnMutex mutex_;
  Poller poller_;
  Events events_;
  Statuses statuses_;
  Plans plans_;
  u32 serial_ = 0;
  std::unique_ptr<Generation> current_;
  std::unique_ptr<Generation> past_;  // `begin` ended it, and it has not told all peers yet
  std::map<std::pair<int, int>, hx_rail_counters> counters_;  // of earlier generations, by peer and rail
  i64 system_calls_ = 0;                                      // of theirs
  bool announce_ = false;
  std::unique_ptr<Report> ended_;  // of this generation, once it has
  std::atomic<bool> aborting_{false};
  Driver driver_;  // the last: it calls back
};
}  // namespace hx
