// A rank's side of the world: what its core sends, reads and reports.
#include <cerrno>

#include "world.hpp"

namespace hx::sim {
i64 Rank::now() { return world.now_; }

i64 Rank::send(int connection, const iovec* pieces, int count) {
  Network& network = world.network_;
  const int side = network.side(connection, me);
  End& end = network.end(connection, side);
  if (end.closed) return world.fail("rank " + std::to_string(me) + " writes to a connection that it closed"), -EBADF;
  if (end.broken) return -EPIPE;
  const u64 most = std::min(end.room(), 1 + world.random_.below(end.piece));
  u64 done = 0;
  Audit& audit = world.audits_[{me, end.peer}];
  const Audit& other = world.audits_[{end.peer, me}];
  for (int i = 0; i < count && done < most; i++) {
    const u64 n = std::min<u64>(pieces[i].iov_len, most - done);
    const u8* bytes = static_cast<const u8*>(pieces[i].iov_base);
    std::string wrong;
    end.written.feed(
        bytes, n, [&] { wrong += audit.sent(end.written.header, world.options_); },
        [&] { wrong += over ? "" : other.said(end.written.header, end.written.body); });
    if (!wrong.empty()) world.fail("rank " + std::to_string(me) + " to " + std::to_string(end.peer) + ": " + wrong);
    if (end.swallows)
      end.swallowed += n;
    else
      end.bytes.append(reinterpret_cast<const char*>(bytes), n);
    done += n;
  }
  if (!done || end.swallows) return i64(done);
  end.last = std::max(end.last, world.now_ + 1 + i64(world.random_.below(u64(end.delay))));
  world.after(end.last - world.now_, World::What::ARRIVE, connection, 1 - side, 0, done);
  return i64(done);
}

i64 Rank::receive(int connection, void* into, std::size_t most) {
  Network& network = world.network_;
  const int side = network.side(connection, me);
  End &mine = network.end(connection, side), &from = network.end(connection, 1 - side);
  if (mine.closed) return world.fail("rank " + std::to_string(me) + " reads from a connection that it closed"), -EBADF;
  if (!from.arrived) return mine.broken ? -ECONNRESET : 0;
  const u64 n = std::min({u64(most), from.arrived, 1 + world.random_.below(from.piece)});
  std::memcpy(into, from.bytes.data(), n);
  Audit &audit = world.audits_[{mine.peer, me}], &other = world.audits_[{me, mine.peer}];
  Counts& counts = world.counts_;
  const Header& h = from.read.header;
  from.read.feed(
      static_cast<const u8*>(into), n,
      [&] {
        other.heard(h, {});
        if (h.kind == Kind::DATA && audit.continued(h.sequence)) counts.add(Count::CONTINUED);
      },
      [&] {
        if (sequenced(h.kind)) audit.came(h.sequence);
        other.heard(h, from.read.body);
        if (h.kind == Kind::DATA && h.flags & EAGER) counts.add(Count::EAGER);
        counts.add(Count::CREDITS, h.kind == Kind::CREDIT), counts.add(Count::WANTS, h.kind == Kind::WANT);
        counts.add(Count::RESUMES, h.kind == Kind::RESUME), counts.add(Count::PROBES, h.kind == Kind::PROBED);
        counts.add(Count::BEATS, h.kind == Kind::BEAT);
        counts.add(Count::RANGES, h.kind == Kind::ACK && h.body > sizeof(AckBody));
      });
  from.bytes.erase(0, n);
  from.arrived -= n;
  if (from.wants) world.look_soon(connection, 1 - side);
  return i64(n);
}

void Rank::want_write(int connection, bool yes) {
  const int side = world.network_.side(connection, me);
  world.network_.end(connection, side).wants = yes;
  if (yes && world.network_.writable(connection, side)) world.look_soon(connection, side);
}

void Rank::close(int connection) { world.close_end(connection, world.network_.side(connection, me)); }

Job* Rank::job_of(i64 name) {
  const i64 task = -1 - name;
  return task >= 0 && task < i64(jobs.size()) ? jobs[std::size_t(task)].get() : nullptr;
}

void Rank::ended(Job& job, Status status) {
  if (job.status != RUNNING) return world.fail("rank " + std::to_string(me) + ": a job ended twice");
  unfinished--;
  const std::string wrong = job.end(status);
  if (!wrong.empty())
    world.fail("rank " + std::to_string(me) + ", task " + std::to_string(job.task().number) + ", status " + std::to_string(status) +
               ": " + wrong);
  if (status == OK && job.deadline != NEVER && world.now_ > job.deadline + 20 * MS && paused_until < job.deadline)
    world.fail("rank " + std::to_string(me) + ": an operation ended well long after its deadline");
}

void Rank::report(Report&& r) {
  Counts& counts = world.counts_;
  if (world.traced_)
    world.note("rank " + std::to_string(me) + " reports event " + std::to_string(i32(r.event)) + " peer " + std::to_string(r.peer) +
               " op " + std::to_string(r.op) + " a " + std::to_string(r.a) + " b " + std::to_string(r.b) + " " + r.text);
  if (over && r.event != Event::DONE) world.fail("rank " + std::to_string(me) + ": a report after the end");
  switch (r.event) {
    case Event::DONE: {
      if (r.op < 0 || r.op >= i64(operations.size())) return world.fail("an unknown operation ended");
      if (r.a != OK && !over) return world.fail("an operation failed before the generation ended");
      counts.add(r.a == OK ? Count::OK : r.a == FAILED ? Count::FAILED : Count::SKIPPED);
      return ended(*operations[std::size_t(r.op)], Status(r.a));
    }
    case Event::SENT:
    case Event::RECEIVED: {
      Job* job = job_of(r.op);
      if (!job || r.a != job->task().first) return world.fail("an unknown message ended");
      counts.add(Count::MESSAGES);
      return ended(*job, OK);
    }
    case Event::ENDED:
      over = true, ended_at = world.now_;
      world.after(301 * MS, World::What::LEAVE, me);
      if (r.text.empty()) world.fail("an end without a cause");
      if (!world.allowed(*this, r)) world.fail("rank " + std::to_string(me) + ": this end has no reason: " + r.text);
      counts.add(Count(i32(Count::END_ABORTED) + i32(r.a) - 1));
      for (auto& job : jobs)
        if (job && job->begun && job->status == RUNNING && job->task().shape->form == Form::MESSAGE) ended(*job, FAILED);
      return;
    case Event::RESTORE:
      world.after(1 + i64(world.random_.below(3 * MS)), World::What::CONNECT, me, r.peer, int(r.a), u64(r.b));
      return;
    case Event::RAIL_LEFT:
    case Event::RAIL_BACK:
      if (bool& away = left[{r.peer, int(r.a)}]; std::exchange(away, r.event == Event::RAIL_LEFT) == away)
        world.fail("rank " + std::to_string(me) + ": a rail was left, or came back, twice");
      return counts.add(r.event == Event::RAIL_LEFT ? Count::RAIL_LEFT : Count::RAIL_BACK);
    case Event::CLOSED:
      return counts.add(Count::CLOSED);
    default:
      return world.fail("an unknown event");
  }
}
}  // namespace hx::sim
