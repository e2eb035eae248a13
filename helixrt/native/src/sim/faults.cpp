// What a seed consists of: settings, work and faults.
#include "world.hpp"

namespace hx::sim {
void World::draw_options() {
  constexpr u64 F = FRAGMENT_BYTES;
  Options& o = options_;
  const bool silent = fatal_ == Count::STOP || fatal_ == Count::VANISH || fatal_ == Count::MISMATCH || fatal_ == Count::LONG_PAUSE;
  o.period = !silent && random_.one_in(4) ? 0 : 1 * S;
  o.connect = 5 * S;
  o.answer = random_.pick<i64>({10 * MS, 40 * MS});
  o.attempt = o.period ? random_.pick<i64>({25 * MS, 100 * MS, 2 * S}) : 2 * S;
  o.retry = 2 * MS, o.rest = random_.pick<i64>({100 * US, 2 * MS}), o.longest_rest = 20 * MS, o.steady = 50 * MS;
  o.acknowledge = random_.pick<i64>({1 * MS, 5 * MS, 20 * MS});
  o.eager_bytes = random_.pick<u64>({0, F / 4, F, 3 * F});
  o.keep_bytes = random_.pick<u64>({0, F / 2, 2 * F});
  o.eager_memory = random_.pick<u64>({F / 2, 2 * F, 2 * F, 16 * F});
  o.rail_bytes = random_.pick<u64>({1, F, 4 * F, 16 * F});
  o.window_bytes = random_.pick<u64>({1, F, 3 * F, 64 * F});
  o.turn_bytes = random_.pick<u64>({64, F, 100 * F});
  o.concurrent = random_.pick({1, 2, 4});
}

void World::draw_work(const Catalogue& catalogue) {
  const u64 spread = random_.pick<u64>({20 * US, 500 * US, 5 * MS});
  const u64 collectives = 1 + random_.below(6), points = random_.below(4), messages = random_.below(5);
  for (u64 i = 0; i < collectives; i++) add_task(catalogue, Form::COLLECTIVE);
  for (u64 i = 0; i < points; i++) add_task(catalogue, Form::POINT);
  for (u64 i = 0; i < messages; i++) add_task(catalogue, Form::MESSAGE);
  const int victim = int(random_.below(u64(size_))), at = int(random_.below(collectives));
  std::vector<int> others = catalogue.of(size_, Form::COLLECTIVE);
  for (auto& rank : ranks_) {
    rank->late = random_.pick<i64>({1, 100 * US, 2 * MS});
    i64 collective = now_;  // all ranks submit them in the same order
    for (const Task& task : std::deque<Task>(tasks_)) {
      const auto role = std::find(task.who.begin(), task.who.end(), rank->me);
      const std::size_t part = std::size_t(role - task.who.begin());
      const Task* mine = &tasks_[std::size_t(task.number)];
      if (fatal_ == Count::MISMATCH && task.number == at && rank->me == victim) {
        Task other = task;
        const int shape = others[random_.below(others.size())];
        other.shape = catalogue.shapes[std::size_t(shape)].get();
        other.fingerprint ^= i64(1) << 40;
        strangers_.push_back(other);
        mine = &strangers_.back();
      }
      if (role == task.who.end() || !mine->shape->parts[part].takes_part) {
        rank->jobs.emplace_back();
        continue;
      }
      rank->jobs.push_back(std::make_unique<Job>(*mine, int(part), seed_));
      i64 when = now_ + i64(random_.below(spread * collectives));
      if (task.shape->form == Form::COLLECTIVE) when = collective += i64(random_.below(spread));
      if (fatal_ == Count::DEADLINE && task.number == at) {
        if (rank->me == victim) when = collective += 500 * MS;
        if (rank->me == (victim + 1) % size_) rank->jobs.back()->deadline = i64(random_.below(100 * MS));
      } else if (random_.one_in(8)) {
        rank->jobs.back()->deadline = 25 * S;  // never reached
      }
      rank->program.push_back({when, task.number});
    }
    std::stable_sort(rank->program.begin(), rank->program.end(), [](const auto& a, const auto& b) { return a.at < b.at; });
  }
}

void World::add_task(const Catalogue& catalogue, Form form) {
  const std::vector<int> shapes = catalogue.of(size_, form);
  if (shapes.empty()) return;
  const int chosen = shapes[random_.below(shapes.size())];
  Task& task = tasks_.emplace_back();
  task.shape = catalogue.shapes[std::size_t(chosen)].get();
  task.number = int(tasks_.size()) - 1;
  task.divisor = random_.pick<i64>({1, 2, 4});
  task.first = form == Form::COLLECTIVE ? 0 : u32(random_.below(1 << 20));
  if (form == Form::COLLECTIVE) task.fingerprint = i64((mixed(u64(chosen)) & 0x3fffffff) | 1) << 31;
  for (int rank = 0; rank < (form == Form::MESSAGE ? 0 : size_); rank++) task.who.push_back(rank);
  if (form != Form::MESSAGE) return;
  const int from = int(random_.below(u64(size_)));
  task.who = {from, (from + 1 + int(random_.below(u64(size_ - 1)))) % size_};
}

void World::draw_fatal(u32 faults) {
  if (random_.one_in(2)) return;
  const i32 count = i32(LAST_FATAL) - i32(FIRST_FATAL) + 1;
  const Count drawn = Count(i32(FIRST_FATAL) + i32(random_.below(u64(count))));
  if (!(faults >> i32(drawn) & 1)) return;
  fatal_ = drawn;
  if (drawn == Count::MISMATCH || drawn == Count::DEADLINE)
    counts_.add(drawn), struck_ = true;
  else
    faults_.push_back({drawn, 0, 0, 0});
}

void World::draw_faults(u32 faults) {
  const i32 count = i32(FIRST_FATAL) - i32(FIRST_FAULT);
  for (u64 i = random_.below(5); i > 0; i--) faults_.push_back({Count(i32(FIRST_FAULT) + i32(random_.below(u64(count)))), 0, 0, 0});
  std::erase_if(faults_, [faults](const Fault& fault) { return !(faults >> i32(fault.kind) & 1); });
  const u64 spread = random_.pick<u64>({500 * US, 5 * MS, 40 * MS});
  for (int i = 0; i < int(faults_.size()); i++) {
    Fault& fault = faults_[std::size_t(i)];
    fault.rank = int(random_.below(u64(size_)));
    fault.peer = (fault.rank + 1 + int(random_.below(u64(size_ - 1)))) % size_;
    fault.rail = int(random_.below(u64(rails_)));
    refuses_ |= fault.kind == Count::REFUSE;
    if (fault.kind != Count::REFUSE) after(i64(random_.below(spread)), What::FAULT, i);
  }
}

void World::strike(const Fault& fault) {
  Rank& rank = *ranks_[std::size_t(fault.rank)];
  if (rank.gone()) return;
  const bool fatal = fault.kind >= FIRST_FATAL;
  if (fatal && rank.over) return;
  if (traced_)
    note(std::string("fault: ") + COUNT_NAMES[std::size_t(fault.kind)] + " of rank " + std::to_string(fault.rank) + ", peer " +
         std::to_string(fault.peer) + ", rail " + std::to_string(fault.rail));
  counts_.add(fault.kind);
  struck_ |= fatal;
  if (fatal && fault.kind != Count::CUT_OFF)
    strike_rank(fault, rank);
  else if (fault.kind == Count::PAUSE)
    rank.paused_until = std::max(rank.paused_until, now_ + i64(random_.below(150 * MS)));
  else
    strike_pair(fault, rank);
}

void World::strike_pair(const Fault& fault, Rank& rank) {
  Way& struck = way(fault.rank, fault.peer, fault.rail);
  switch (fault.kind) {
    case Count::BREAK_ALL:
    case Count::CUT_OFF:
      for (int rail = 0; rail < rails_; rail++) {
        Way& each = way(fault.rank, fault.peer, rail);
        if (fault.kind == Count::CUT_OFF) each.dead_until = NEVER;
        if (each.newest >= 0) break_connection(each.newest, true);
      }
      return;
    case Count::RAIL_DEAD:
      struck.dead_until = fault.rail ? random_.pick<i64>({now_ + 30 * MS, NEVER}) : now_ + 30 * MS;
      break;
    case Count::SLOW:
      if (struck.newest < 0) return;
      for (int side = 0; side < 2; side++) network_.end(struck.newest, side).delay *= 30;
      slowed_ = true;
      rank.core->rail_slow(fault.peer, fault.rail);
      return turn(rank);
    case Count::BLACK_HOLE:  // nothing comes any more, and nobody learns; another rail shows that the peer lives
      if (struck.newest >= 0 && fault.rail) network_.swallow(struck.newest, int(random_.below(2)), random_);
      return;
    default:
      break;
  }
  if (struck.newest >= 0) break_connection(struck.newest, true);
}

void World::strike_rank(const Fault& fault, Rank& rank) {
  switch (fault.kind) {
    case Count::LONG_PAUSE:
      rank.paused_until = now_ + i64((1 + random_.below(3)) * S);
      return;
    case Count::STOP:
      rank.state = Rank::STOPPED;
      return;
    case Count::DIE:  // its host answers for it
    case Count::VANISH:
      rank.state = Rank::DEAD;
      for (int i = 0; i < int(network_.connections.size()); i++)
        if (network_.end(i, 0).rank == rank.me || network_.end(i, 1).rank == rank.me) break_connection(i, fault.kind == Count::DIE);
      return;
    case Count::ABORT:
      rank.core->abort(hx::End::ABORTED, "the seed aborts");
      break;
    case Count::LEAVE:
      rank.program.clear();
      break;
    case Count::LOSE:
      rank.core->lose(fault.peer, "the seed says so");
      break;
    default:
      break;
  }
  turn(rank);
}

bool World::allowed(const Rank& rank, const Report& ended) const {
  const hx::End end = hx::End(ended.a);
  if (rank.state == Rank::CLOSES && end == hx::End::PEER) return true;  // all was done
  if (end == hx::End::ABORTED) return fatal_ == Count::ABORT && struck_;
  if (end == hx::End::DEADLINE) return fatal_ == Count::DEADLINE;
  if (end == hx::End::MISMATCH) return fatal_ == Count::MISMATCH;
  return struck_ || slowed_;
}
}  // namespace hx::sim
