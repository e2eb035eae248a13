// A few ranks, each one `Core`, on a simulated network and a virtual clock. A seed decides everything: work, times, sizes of what is
// sent and read, and faults. What must hold is checked all the time; the first thing that is wrong ends the run.
#pragma once
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <queue>

#include "../core.hpp"
#include "audit.hpp"
#include "counts.hpp"
#include "job.hpp"
#include "network.hpp"

namespace hx::sim {
constexpr i64 US = 1'000, MS = 1'000'000, S = 1'000'000'000;
constexpr i64 LINGER = 2 * S;  // how long a rank waits for the end of its farewell, where a fault may keep that back

class World;

struct Rank final : Io {
  enum State : u8 { WORKS, CLOSES, LEFT, STOPPED, DEAD };  // LEFT: in order, or after the end of the generation

  Rank(World& world, int me) : world(world), me(me) {}
  bool acts() const { return state <= CLOSES; }
  bool gone() const { return state >= LEFT; }

  // Io
  i64 now() override;
  i64 send(int connection, const iovec* pieces, int count) override;
  i64 receive(int connection, void* into, std::size_t most) override;
  void want_write(int connection, bool yes) override;
  void close(int connection) override;
  void report(Report&& report) override;

  void ended(Job& job, Status status);
  Job* job_of(i64 name);

  World& world;
  const int me;
  State state = WORKS;
  std::unique_ptr<Core> core;
  std::vector<std::unique_ptr<Job>> jobs;  // [task]; null: no part in it
  std::vector<Job*> operations;            // [Core's number]
  struct Action {
    i64 at;
    int task;
  };
  std::deque<Action> program;  // in the order of their times
  i64 paused_until = 0, tick_at = NEVER, ended_at = NEVER, closed_at = 0, late = 0;
  int unfinished = 0, overdue = 0;
  bool over = false, closing = false;
  std::map<std::pair<int, int>, bool> left;  // (peer, rail) that is reported as left
};

class World {
 public:
  World(const Catalogue& catalogue, u64 seed, u32 faults, Counts& counts, bool traced);
  ~World();
  std::string run();  // what is wrong, or nothing

 private:
  friend struct Rank;
  enum class What : u8 { ARRIVE, LOOK, EOF_, LEARN, UP, DOWN, CONNECT, TICK, ACT, FAULT, CLOSE, LEAVE };
  struct Event {
    i64 at;
    u64 tie;
    What what;
    i32 a, b, c;
    u64 n;
    bool operator<(const Event& other) const { return at != other.at ? at > other.at : tie > other.tie; }
  };
  struct Fault {
    Count kind;
    int rank, peer, rail;
  };
  struct Way {  // a rail between two ranks
    int newest = -1;
    u32 number = 0;
    i64 dead_until = 0;
  };

  // world.cpp: time and network
  void after(i64 delay, What what, int a, int b = 0, int c = 0, u64 n = 0);
  void happen(const Event& event);
  bool postponed(const Event& event, int rank);
  void look_soon(int connection, int side);
  void look(int connection, int side);
  void connect(Way& way, int a, int b, int rail);
  void up(int connection, int side);
  void restore(int rank, int peer, int rail, u32 number);
  void close_end(int connection, int side);
  void break_connection(int connection, bool known);
  void turn(Rank& rank);  // after each call of its core
  void tick(Rank& rank);
  void act(Rank& rank);
  void leave(Rank& rank);
  Way& way(int a, int b, int rail) { return ways_[std::size_t((std::min(a, b) * size_ + std::max(a, b)) * rails_ + rail)]; }
  bool current(int connection, int side);
  bool settled() const;
  void fail(std::string what);
  void note(const std::string& text);

  // faults.cpp: what a seed consists of
  void draw_options();
  void draw_work(const Catalogue& catalogue);
  void add_task(const Catalogue& catalogue, Form form);
  void draw_fatal(u32 faults);
  void draw_faults(u32 faults);
  void strike(const Fault& fault);
  void strike_pair(const Fault& fault, Rank& rank);
  void strike_rank(const Fault& fault, Rank& rank);
  bool allowed(const Rank& rank, const Report& ended) const;

  const u64 seed_;
  Random random_;
  Counts& counts_;
  const bool traced_;
  i64 now_ = 1 * S;
  u64 events_ = 0;
  std::string wrong_;
  std::deque<std::string> trace_;
  std::priority_queue<Event> queue_;
  int size_ = 0, rails_ = 0;
  Options options_;
  Network network_;
  std::vector<Way> ways_;
  std::map<std::pair<int, int>, Audit> audits_;  // (from, to)
  std::deque<Task> tasks_, strangers_;  // strangers: of a rank that calls another operation than the others
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<Fault> faults_;
  Count fatal_ = Count::NONE;  // the fault that may end the generation
  bool struck_ = false;        // it has come about
  bool slowed_ = false;  // a rail's delay may now be longer than the period of liveness
  bool refuses_ = false;       // attempts to restore a rail fail now and then
};
}  // namespace hx::sim
