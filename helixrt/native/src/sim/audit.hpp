// What one rank may say to another, seen from outside: acknowledgements of what has come, no more bytes than the window and the
// memory for early messages allow. The sender is given credit for an acknowledgement when its bytes are read, so an audit never
// accuses a correct sender.
#pragma once
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "../io.hpp"
#include "../wire.hpp"

namespace hx::sim {
class Audit {  // of the frames from one rank to another, over all rails
 public:
  // The sender has written the header of a fragment. Returns what is wrong, or nothing.
  std::string sent(const Header& h, const Options& options) {
    if (h.kind != Kind::DATA || !sent_.insert(h.sequence).second) return {};
    if (h.body) out_[h.sequence] = h.body;
    bytes_ += h.body;
    if (h.flags & EAGER && !h.offset) eager_ += h.length;
    window_full = window_full || bytes_ + FRAGMENT_BYTES > options.window_bytes;
    if (bytes_ > options.window_bytes && out_.size() > 1) return "more bytes than the window are not acknowledged";
    if (eager_ > eager_back_ + options.eager_memory) return "more early bytes than the memory for them";
    return {};
  }
  void came(u64 sequence) {  // whole, at the receiver
    if (sequence <= floor_) return;
    above_.insert(sequence);
    while (!above_.empty() && *above_.begin() == floor_ + 1) above_.erase(above_.begin()), floor_++;
  }
  void broken_off(u64 sequence) { parts_.insert(sequence); }  // a part has come, then the connection broke
  bool continued(u64 sequence) { return parts_.erase(sequence) > 0; }

  // The receiver says what has come.
  std::string said(const Header& h, const std::vector<u8>& body) const {
    if (h.floor > floor_) return "it acknowledges sequence " + std::to_string(h.floor) + ", which has not come";
    std::string wrong;
    ranges(h, body, [&](u64 first, u64 last) {
      for (u64 s = std::max(first, floor_ + 1); s <= last && wrong.empty(); s++)
        if (!above_.count(s)) wrong = "it acknowledges sequence " + std::to_string(s) + ", which has not come";
    });
    return wrong;
  }
  void heard(const Header& h, const std::vector<u8>& body) {  // the sender has read that
    forget(0, h.floor);
    ranges(h, body, [&](u64 first, u64 last) { forget(first, last); });
    if (counts(h, body)) eager_back_ = std::max(eager_back_, word(body, 1));
  }
  bool window_full = false;

 private:
  static bool counts(const Header& h, const std::vector<u8>& body) {
    return (h.kind == Kind::ACK || h.kind == Kind::RESUME) && body.size() >= sizeof(AckBody);
  }
  static u64 word(const std::vector<u8>& body, u64 index) {
    u64 found;
    std::memcpy(&found, body.data() + index * sizeof found, sizeof found);
    return found;
  }
  template <typename Each>
  static void ranges(const Header& h, const std::vector<u8>& body, Each&& each) {
    if (!counts(h, body)) return;
    each(1, word(body, 0));
    for (u64 i = 2; (i + 2) * sizeof(u64) <= body.size(); i += 2) each(word(body, i), word(body, i + 1));
  }
  void forget(u64 first, u64 last) {
    auto from = out_.lower_bound(first), to = out_.upper_bound(last);
    for (auto each = from; each != to; ++each) bytes_ -= each->second;
    out_.erase(from, to);
  }

  std::map<u64, u64> out_;  // sequence -> bytes of fragments that the sender does not know to have come
  u64 bytes_ = 0, eager_ = 0, eager_back_ = 0;
  u64 floor_ = 0;
  std::set<u64> sent_, above_, parts_;
};
}  // namespace hx::sim
