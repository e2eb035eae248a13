// What the owner of an engine has not fetched yet. With the engine's mutex held.
#pragma once
#include <cstring>
#include <deque>

#include "../io.hpp"
#include "helixrt_native.h"
#include "poller.hpp"

namespace hx {
inline hx_event as_event(const Report& report, i64 at) {
  hx_event event{i32(report.event), report.peer, report.op, report.a, report.b, at, {}};
  std::memcpy(event.text, report.text.data(), std::min(report.text.size(), sizeof event.text - 1));
  return event;
}

class Events {
 public:
  int fd() const { return event_.get(); }
  void abandon() { event_.close(); }
  std::size_t waiting() const { return events_.size(); }
  void push(Report&& report, i64 at) {
    events_.push_back({std::move(report), at});
    if (events_.size() == 1) set_event(event_.get());
  }
  i32 take(hx_event* into, i32 most) {
    i32 n = 0;
    for (; n < most && !events_.empty(); n++) {
      into[n] = as_event(events_.front().report, events_.front().at);
      events_.pop_front();
    }
    if (n && events_.empty()) clear_event(event_.get());
    return n;
  }

 private:
  struct Entry {
    Report report;
    i64 at;
  };
  Descriptor event_ = event_descriptor();
  std::deque<Entry> events_;
};
}  // namespace hx
