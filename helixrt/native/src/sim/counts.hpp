// How often each fault came about, and each rule of the core was met.
#pragma once
#include <array>

#include "../types.hpp"

namespace hx::sim {
enum class Count : i32 {
  NONE,
  // faults that a generation survives
  BREAK, BREAK_ALL, RAIL_DEAD, REFUSE, SLOW, BLACK_HOLE, PAUSE,
  // faults that may end it
  LONG_PAUSE, STOP, DIE, VANISH, ABORT, DEADLINE, MISMATCH, LEAVE, CUT_OFF, LOSE,
  // what came about
  OPERATIONS, OK, FAILED, SKIPPED, MESSAGES, RAIL_LEFT, RAIL_BACK, RESUMES, DUPLICATES, AGAIN, CONTINUED, EAGER, CREDITS, WANTS,
  WINDOW_FULL, PROBES, RANGES, BEATS, CLOSED, END_ABORTED, END_PEER, END_DEADLINE, END_MISMATCH, EVENTS,
  COUNTS,
};
constexpr const char* COUNT_NAMES[] = {
    "none", "break", "break_all", "rail_dead", "refuse", "slow", "black_hole", "pause", "long_pause", "stop", "die", "vanish",
    "abort", "deadline", "mismatch", "leave", "cut_off", "lose", "operations", "ok", "failed", "skipped", "messages", "rail_left",
    "rail_back", "resumes", "duplicates", "again", "continued", "eager", "credits", "wants", "window_full", "probes", "ranges",
    "beats", "closed", "end_aborted", "end_peer", "end_deadline", "end_mismatch", "events"};
static_assert(std::size(COUNT_NAMES) == std::size_t(Count::COUNTS));
constexpr Count FIRST_FAULT = Count::BREAK, FIRST_FATAL = Count::LONG_PAUSE, LAST_FATAL = Count::LOSE;

struct Counts {
  std::array<i64, std::size_t(Count::COUNTS)> of{};
  void add(Count what, i64 count = 1) { of[std::size_t(what)] += count; }
};
}  // namespace hx::sim
