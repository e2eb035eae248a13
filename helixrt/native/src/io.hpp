// Everything that the cores need from outside, and their settings. The host implements `Io` with sockets, shared memory and the
// clock; the simulated world with a virtual clock and a seeded network. The cores call it from the one thread that drives them.
#pragma once
#include <sys/uio.h>

#include "hopping.hpp"
#include "types.hpp"
#include "wire.hpp"

namespace hx {
// What the owner of a core learns. The values are part of the ABI.
enum class Event : i32 {
  DONE = 1,      // operation `op` ended with Status `a`
  SENT = 2,      // message (op, a) to `peer`: its memory may be written again
  RECEIVED = 3,  // message (op, a) of `peer` is whole
  ENDED = 4,     // the generation is over: End `a`; `peer` caused it or -1; text: the cause
  RESTORE = 5,   // connect rail `a` to `peer` again, as connection number `b`: answer with rail_up or rail_down
  RAIL_LEFT = 6,  // rail `a` to `peer` is not used any more, `b` others are; `op`: Failure, or -1 for slow; text: why
  RAIL_BACK = 7,  // rail `a` to `peer` carries traffic again, as one of `b`
  HOPPED = 11,    // new messages to `peer` go on rail `b` instead of `a`; text: reason and RTTs in seconds
  PROBED = 12,    // rail `a` to `peer` was measured; text: the RTT in seconds
  CLOSED = 8,     // `peer` closed in order
  NODE = 9,       // of an operation with `external` work: carry out node `a` (a reduction, a copy), or allow it (a send of the
                  // source), then call Core::node_done
  ARRIVED = 10,   // of such an operation: the message of node `a` is in its memory
};

struct Report {
  Event event;
  i32 peer = -1;
  i64 op = 0, a = 0, b = 0;
  std::string text;
};

struct Io {
  virtual ~Io() = default;
  virtual i64 now() = 0;  // ns, monotonic
  // Connections are named by the number that was given to Core::rail_up. Both return the bytes taken or read, 0 when there is no
  // room or nothing has come, and -errno when the connection is broken; the peer's end of it is -ECONNRESET.
  virtual i64 send(int connection, const iovec* pieces, int count) = 0;
  virtual i64 receive(int connection, void* into, std::size_t most) = 0;
  virtual void want_write(int connection, bool yes) = 0;  // whether Core::writable is to be called when there is room
  virtual void close(int connection) = 0;                 // it is not named again
  virtual void report(Report&& report) = 0;
};

// Times in ns. Both ends of a link have the same.
struct Options {
  i64 period = 1'000'000'000;         // of liveness: a silent peer is lost after 1.5 of it; 0: never
  i64 connect = 60'000'000'000;       // from the beginning until the first rail to a peer is up
  i64 answer = 500'000'000;           // for an answer to RESUME or PROBE; then RESUME is said again, a probed rail is reset
  i64 attempt = 30'000'000'000;       // of a frame on a rail: not acknowledged by then, the rail failed
  i64 retry = 250'000'000;            // between the beginnings of two attempts to restore a rail
  i64 rest = 100'000'000;             // of a rail that fails again, doubled with each failure
  i64 longest_rest = 30'000'000'000;
  i64 steady = 10'000'000'000;        // in service without a failure: earlier ones are forgotten
  i64 acknowledge = 20'000'000;       // what nobody waits for is acknowledged this late
  u64 eager_bytes = 512 << 10;        // messages up to this travel before their receiver has posted them
  u64 keep_bytes = 512 << 10;         // messages up to this are copied when nothing but their acknowledgement is waited for
  u64 eager_memory = 4 << 20;         // bytes of such messages that may wait at the receiver
  u64 rail_bytes = 4 << 20;           // handed to a rail and not written yet, at most one fragment more
  u64 window_bytes = 64 << 20;        // sent to a peer and not acknowledged; one fragment may always go
  u64 turn_bytes = 2 << 20;           // read from, or written to, one rail in one turn, about
  int concurrent = 4;                 // collectives at once; later ones are queued
  // Where rails are paths through the network, of one rated speed:
  HoppingOptions hopping;             // policy NONE: fragments go where the least is queued
  double rate_bytes_per_s = 0, latency_s = 1e-3;  // of an idle path; latency: of an empty message and its acknowledgement
  u64 standard_bytes = FRAGMENT_BYTES;            // of a message whose RTT is meant
  u64 probe_bytes = 64 << 10;
  u64 depth_bytes = 2 << 20;  // given to a path before it has acknowledged what it has; one fragment may always go
  u64 seed = 0;               // of the policy's draws
};
}  // namespace hx
