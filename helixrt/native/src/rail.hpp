// One of the ways between two ranks, over all its connections.
#pragma once
#include <memory>

#include "stream.hpp"

namespace hx {
struct Rail {
  enum State : u8 {
    DOWN,     // no connection; it is restored from `due` on
    PROBING,  // connected again, until the peer has answered a probe over it
    SERVING,
    LEAVING,  // connected, but slow: no new frames, until those on it are acknowledged
    RESTING,  // connected, but slow: not used until `due`, then probed
  };
  State state = DOWN;
  std::unique_ptr<Stream> stream;  // null when DOWN
  u32 number = 0;                  // of the newest connection, from 1
  bool restoring = false;          // the owner was asked for a connection
  i64 due = 0;                     // of what the state waits for
  i64 asked = 0;                   // when the owner was asked last
  i64 since = 0;                   // when it began to serve
  i64 rest = 0;                    // before the next use, after another failure
  i64 heard = 0, said = 0;
  i64 probe = 0;
  bool left = false;  // RAIL_LEFT was reported, and RAIL_BACK not
  Failure failure = Failure::PATH;
  std::string reason;
  i64 failures = 0, returns = 0;
  i64 frames_sent = 0, frames_received = 0, bytes_sent = 0, bytes_received = 0;  // of earlier connections

  bool up() const { return stream != nullptr; }
  bool usable() const { return state == SERVING; }
};
}  // namespace hx
