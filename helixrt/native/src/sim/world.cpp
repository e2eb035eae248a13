#include "world.hpp"

namespace hx::sim {
World::World(const Catalogue& catalogue, u64 seed, u32 faults, Counts& counts, bool traced)
    : seed_(seed), random_(seed), counts_(counts), traced_(traced) {
  size_ = random_.pick({2, 2, 3, 3, 4, 5});
  rails_ = random_.pick({1, 2, 2, 3});
  ways_.resize(std::size_t(size_ * size_ * rails_));
  draw_fatal(faults);
  draw_options();
  for (int me = 0; me < size_; me++) {
    std::vector<int> rails(std::size_t(size_), rails_);
    rails[std::size_t(me)] = 0;
    ranks_.push_back(std::make_unique<Rank>(*this, me));
    ranks_.back()->core = std::make_unique<Core>(*ranks_.back(), options_, 7, me, rails);
  }
  draw_work(catalogue);
  draw_faults(faults);
  for (int a = 0; a < size_; a++)
    for (int b = a + 1; b < size_; b++)
      for (int rail = 0; rail < rails_; rail++) {
        if (rail && random_.one_in(8)) {  // could not be connected at first
          for (int end : {a, b}) after(i64(random_.below(3 * MS)), What::DOWN, end, end == a ? b : a, rail);
        } else {
          connect(way(a, b, rail), a, b, rail);
        }
      }
  for (auto& rank : ranks_) {
    if (!rank->program.empty()) after(rank->program.front().at - now_, What::ACT, rank->me);
    turn(*rank);
  }
}

World::~World() = default;

std::string World::run() {
  const i64 limit = now_ + 30 * S;
  constexpr u64 MOST_EVENTS = 2'000'000;
  while (wrong_.empty() && !settled()) {
    if (queue_.empty() || now_ > limit || events_ > MOST_EVENTS) {
      fail(queue_.empty() ? "nothing is left to happen" : "no end in sight");
      break;
    }
    const Event event = queue_.top();
    queue_.pop();
    now_ = std::max(now_, event.at);
    events_++;
    happen(event);
  }
  for (auto& rank : ranks_) {
    for (auto& job : rank->jobs)
      if (const std::string wrong = job ? job->untouched() : ""; !wrong.empty())
        fail("rank " + std::to_string(rank->me) + ", task " + std::to_string(job->task().number) + ": " + wrong);
    for (int peer = 0; peer < size_; peer++) {
      if (const Link* link = rank->core->link(peer); link != nullptr)
        counts_.add(Count::DUPLICATES, i64(link->duplicates())), counts_.add(Count::AGAIN, i64(link->fragments_again()));
    }
  }
  for (auto& [pair, audit] : audits_) counts_.add(Count::WINDOW_FULL, audit.window_full);
  counts_.add(Count::EVENTS, i64(events_));
  if (wrong_.empty() || !traced_) return wrong_;
  std::string text = wrong_ + "\n" + std::to_string(size_) + " ranks, " + std::to_string(rails_) + " rails, " +
                     std::to_string(tasks_.size()) + " tasks, at " + std::to_string(now_ - S) + " ns\n";
  for (const std::string& line : trace_) text += line + "\n";
  for (auto& rank : ranks_)
    text += "state " + std::to_string(rank->state) + ", unfinished " + std::to_string(rank->unfinished) + ": " + rank->core->print();
  return text;
}

void World::fail(std::string what) {
  if (wrong_.empty()) wrong_ = std::move(what);
}

void World::note(const std::string& text) {
  constexpr std::size_t KEPT = 400;
  trace_.push_back(std::to_string((now_ - S) / US) + " us: " + text);
  if (trace_.size() > KEPT) trace_.pop_front();
}

bool World::settled() const {
  for (auto& rank : ranks_)
    if (!rank->gone()) return false;
  return true;
}

// ---------------------------------------------------------------- time

void World::after(i64 delay, What what, int a, int b, int c, u64 n) { queue_.push({now_ + delay, random_.next(), what, a, b, c, n}); }

bool World::postponed(const Event& event, int number) {
  Rank& rank = *ranks_[std::size_t(number)];
  if (!rank.acts()) return true;
  if (rank.paused_until <= now_) return false;
  after(rank.paused_until - now_ + i64(random_.below(10 * US)), event.what, event.a, event.b, event.c, event.n);
  return true;
}

void World::happen(const Event& e) {
  switch (e.what) {
    case What::ARRIVE: {
      End& from = network_.end(e.a, 1 - e.b);
      from.arrived = std::min<u64>(from.bytes.size(), from.arrived + e.n);
      return look_soon(e.a, e.b);
    }
    case What::EOF_:  // the other end was closed, or the connection broke: what was sent is lost from now on
    case What::LEARN: {
      End& end = network_.end(e.a, e.b);
      end.broken = true;
      if (e.what == What::LEARN && random_.one_in(2)) network_.end(e.a, 1 - e.b).bytes.clear(), network_.end(e.a, 1 - e.b).arrived = 0;
      return look_soon(e.a, e.b);
    }
    case What::LOOK:
      if (!postponed(e, network_.end(e.a, e.b).rank)) look(e.a, e.b);
      return;
    case What::UP:
      if (!postponed(e, network_.end(e.a, e.b).rank))
        up(e.a, e.b);
      else if (const Rank& rank = *ranks_[std::size_t(network_.end(e.a, e.b).rank)]; rank.gone() && rank.state != Rank::STOPPED)
        close_end(e.a, e.b);
      return;
    case What::CONNECT:
      return restore(e.a, e.b, e.c, u32(e.n));
    case What::FAULT:
      return strike(faults_[std::size_t(e.a)]);
    default:
      break;
  }
  if (postponed(e, e.a)) return;
  Rank& rank = *ranks_[std::size_t(e.a)];
  switch (e.what) {
    case What::DOWN:
      if (traced_) note("rank " + std::to_string(e.a) + ": rail " + std::to_string(e.c) + " to " + std::to_string(e.b) + " is down");
      rank.core->rail_down(e.b, e.c, Failure(e.n), "not connected");
      break;
    case What::TICK:
      if (e.n != u64(rank.tick_at)) return;
      return tick(rank);
    case What::ACT:
      act(rank);
      break;
    case What::CLOSE:
      if (!rank.over) rank.state = Rank::CLOSES, rank.closed_at = now_, rank.core->close();
      after(LINGER + US, What::LEAVE, rank.me);
      break;
    default:
      break;
  }
  turn(rank);
}

void World::tick(Rank& rank) {
  rank.tick_at = NEVER;
  rank.core->tick();
  const int before = rank.overdue;
  turn(rank);
  rank.overdue = !rank.gone() && rank.core->due() <= now_ ? before + 1 : 0;
  if (rank.overdue > 3) fail("rank " + std::to_string(rank.me) + ": its time stays in the past");
}

void World::turn(Rank& rank) {
  Core& core = *rank.core;
  rank.overdue = 0;
  core.flush();
  if (rank.over && (core.running() || core.busy())) fail("rank " + std::to_string(rank.me) + " is busy after its end");
  if (const i64 due = core.due(); due < rank.tick_at) {
    rank.tick_at = due;
    after(std::max<i64>(due - now_, 0) + 1 + i64(random_.below(u64(rank.late))), What::TICK, rank.me, 0, 0, u64(due));
  }
  const bool finished = rank.program.empty() && !rank.unfinished;
  if (rank.state == Rank::WORKS && finished && !rank.over && !std::exchange(rank.closing, true))
    after(i64(random_.below(random_.pick<u64>({10 * US, MS, 20 * MS}))), What::CLOSE, rank.me);
  if (rank.over && finished && (!core.unsaid() || now_ > rank.ended_at + 300 * MS)) return leave(rank);
  if (rank.state == Rank::CLOSES && (!core.unsaid() || (struck_ && now_ > rank.closed_at + LINGER))) leave(rank);
}

void World::act(Rank& rank) {
  if (rank.program.empty()) return;  // it was told to leave
  const int task = rank.program.front().task;
  rank.program.pop_front();
  if (!rank.program.empty()) after(std::max<i64>(rank.program.front().at - now_, 0), What::ACT, rank.me);
  Job& job = *rank.jobs[std::size_t(task)];
  const Task& t = job.task();
  rank.unfinished++, job.begun = true;
  if (traced_)
    note("rank " + std::to_string(rank.me) + " begins task " + std::to_string(t.number) + " of form " + std::to_string(i32(t.shape->form)) +
         ", source " + std::to_string(job.part().source_bytes) + ", out " + std::to_string(job.part().out_bytes));
  const Part& part = job.part();
  if (t.shape->form == Form::MESSAGE) {
    const bool sends = rank.me == t.who[0];
    const int peer = t.who[sends ? 1 : 0];
    const Name name{t.name(), t.first};
    const bool taken = sends ? rank.core->send(peer, name, job.source(), u64(part.source_bytes))
                             : rank.core->receive(peer, name, job.out(), u64(part.out_bytes));
    // refused: the generation is over, also if that is not reported yet
    if (!taken && job.status == RUNNING) rank.ended(job, SKIPPED);
    return;
  }
  counts_.add(Count::OPERATIONS);
  Call call;
  call.plan = part.plan.get(), call.source = job.source(), call.out = job.out(), call.reduction = job.reduction();
  if (part.in_place && part.source_at == part.out_at) call.source = call.out;
  call.deadline = job.deadline = job.deadline == NEVER ? NEVER : now_ + job.deadline;
  call.fingerprint = t.fingerprint, call.name = t.name(), call.first = t.first;
  rank.operations.push_back(&job);
  if (rank.core->submit(call) != i64(rank.operations.size()) - 1) fail("operations are not numbered in order");
}

void World::leave(Rank& rank) {
  rank.state = Rank::LEFT;
  if (traced_) note("rank " + std::to_string(rank.me) + " leaves");
  for (int i = 0; i < int(network_.connections.size()); i++)
    for (int side = 0; side < 2; side++)
      if (network_.end(i, side).rank == rank.me && current(i, side)) close_end(i, side);
}

// ---------------------------------------------------------------- network

bool World::current(int connection, int side) {
  const End& end = network_.end(connection, side);
  return ranks_[std::size_t(end.rank)]->core->link(end.peer)->connection(network_.connections[std::size_t(connection)].rail) == connection;
}

void World::look_soon(int connection, int side) {
  End& end = network_.end(connection, side);
  if (end.closed || std::exchange(end.looks, true)) return;
  after(1 + i64(random_.below(20 * US)), What::LOOK, connection, side);
}

void World::look(int connection, int side) {
  End& end = network_.end(connection, side);
  end.looks = false;
  if (end.closed || !current(connection, side)) return;
  Rank& rank = *ranks_[std::size_t(end.rank)];
  const int peer = end.peer, rail = network_.connections[std::size_t(connection)].rail;
  if (network_.readable(connection, side)) rank.core->readable(peer, rail);
  if (current(connection, side) && network_.end(connection, side).wants && network_.writable(connection, side))
    rank.core->writable(peer, rail);
  turn(rank);
  const End& now = network_.end(connection, side);
  if (!now.closed && (network_.readable(connection, side) || (now.wants && network_.writable(connection, side))))
    look_soon(connection, side);
}

void World::connect(Way& way, int a, int b, int rail) {
  way.newest = network_.connect(a, b, rail, ++way.number, random_);
  for (int side = 0; side < 2; side++) after(1 + i64(random_.below(2 * MS)), What::UP, way.newest, side);
}

void World::up(int connection, int side) {
  End& end = network_.end(connection, side);
  const Connection& c = network_.connections[std::size_t(connection)];
  Rank& rank = *ranks_[std::size_t(end.rank)];
  if (traced_)
    note("rank " + std::to_string(end.rank) + ": rail " + std::to_string(c.rail) + " to " + std::to_string(end.peer) + " is up, number " +
         std::to_string(c.number));
  const int peer = end.peer;
  rank.core->rail_up(peer, c.rail, connection, c.number);
  turn(rank);
  look_soon(connection, side);
}

void World::restore(int number, int peer, int rail, u32 wanted) {
  Rank& other = *ranks_[std::size_t(peer)];
  Way& found = way(number, peer, rail);
  if (wanted <= found.number) return;  // the other end asked, too: it is on its way
  const bool refused = refuses_ && random_.one_in(3), dead = found.dead_until > now_;
  if (!other.gone() && !refused && !dead) return connect(found, std::min(number, peer), std::max(number, peer), rail);
  counts_.add(Count::REFUSE, refused);
  const Failure how = other.gone() && other.state != Rank::STOPPED && fatal_ != Count::VANISH && !dead
                          ? Failure::PEER_GONE
                          : random_.pick({Failure::PATH, Failure::PATH, Failure::DEVICE, Failure::CASCADE});
  after(1 + i64(random_.below(3 * MS)), What::DOWN, number, peer, rail, u64(how));
}

void World::close_end(int connection, int side) {
  End &mine = network_.end(connection, side), &other = network_.end(connection, 1 - side);
  if (std::exchange(mine.closed, true)) return;
  if (traced_) note("rank " + std::to_string(mine.rank) + " closes connection " + std::to_string(connection));
  if (other.read.inside_fragment()) audits_[{mine.peer, mine.rank}].broken_off(other.read.header.sequence);
  const bool unread = !other.bytes.empty();
  other.swallows = true;
  other.bytes.clear(), other.arrived = 0;
  if (unread && random_.one_in(2)) network_.swallow(connection, side, random_);  // as a reset does
  after(std::max(mine.last - now_, i64(0)) + 1 + i64(random_.below(200 * US)), What::EOF_, connection, 1 - side);
}

void World::break_connection(int connection, bool known) {
  for (int side = 0; side < 2; side++) {
    network_.swallow(connection, side, random_);
    if (known) after(1 + i64(random_.below(random_.pick<u64>({10 * US, MS, 20 * MS}))), What::LEARN, connection, side);
  }
}
}  // namespace hx::sim
