// Connections of the simulated world. Each direction is a queue of bytes with a capacity and a delay; sends and reads take a part.
// A connection that breaks loses what is under way from a random byte on, and each end learns of it in its own time.
#pragma once
#include <sys/uio.h>

#include <deque>
#include <string>
#include <utility>

#include "frames.hpp"
#include "random.hpp"

namespace hx::sim {
struct End {
  int rank = 0, peer = 0;
  bool closed = false;    // by its owner
  bool broken = false;    // its owner can know that nothing else comes
  bool wants = false;     // to write
  bool looks = false;     // a LOOK is scheduled
  // what its owner sends
  std::string bytes;      // not read by the other end
  u64 arrived = 0;        // of them
  u64 swallowed = 0;      // sent and lost
  bool swallows = false;  // what is sent from now on does not arrive
  u64 capacity = 0, piece = 0;
  i64 delay = 0, last = 0;  // the newest byte arrives then
  Frames written, read;     // the frames of this direction, at both ends
  u64 room() const { return capacity - std::min(capacity, bytes.size() + swallowed); }
};

struct Connection {
  int rail = 0;
  u32 number = 0;
  End ends[2];
};

struct Network {
  std::deque<Connection> connections;

  int connect(int a, int b, int rail, u32 number, Random& random) {
    Connection made;
    made.rail = rail, made.number = number;
    for (int side = 0; side < 2; side++) {
      End& end = made.ends[side];
      end.rank = side ? b : a, end.peer = side ? a : b;
      end.capacity = random.pick<u64>({20, 300, 2000, 2000, 20000, 100000}) * FRAGMENT_BYTES / 256;
      end.piece = random.pick<u64>({random.one_in(4) ? u64(1) : u64(50), 200, 3000, 1 << 20, 1 << 20}) * FRAGMENT_BYTES / 256;
      end.delay = random.pick<i64>({1'000, 10'000, 100'000});
    }
    connections.push_back(std::move(made));
    return int(connections.size()) - 1;
  }
  int side(int connection, int rank) const { return connections[std::size_t(connection)].ends[0].rank == rank ? 0 : 1; }
  End& end(int connection, int side) { return connections[std::size_t(connection)].ends[side]; }

  bool readable(int connection, int side) { return end(connection, side).broken || end(connection, 1 - side).arrived; }
  bool writable(int connection, int side) { return end(connection, side).broken || end(connection, side).room(); }

  void swallow(int connection, int side, Random& random) {  // what this end sends is lost, from somewhere under way on
    End& from = end(connection, side);
    if (std::exchange(from.swallows, true)) return;
    const u64 kept = from.arrived + random.below(from.bytes.size() - from.arrived + 1);
    from.swallowed += from.bytes.size() - kept;
    from.bytes.resize(kept);
  }
};
}  // namespace hx::sim
