// Cuts a stream of bytes into frames: what an observer of one direction of a connection sees.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "../wire.hpp"

namespace hx::sim {
class Frames {
 public:
  Header header;
  std::vector<u8> body;  // of a frame that is no DATA

  // `begun` is called when a header is whole, `whole` when its body is, too.
  template <typename Begun, typename Whole>
  void feed(const u8* bytes, u64 count, Begun&& begun, Whole&& whole) {
    while (count) {
      const u64 limit = have_ < sizeof header ? sizeof header : sizeof header + header.body;
      const u64 n = std::min(count, limit - have_);
      if (have_ < sizeof header)
        std::memcpy(reinterpret_cast<u8*>(&header) + have_, bytes, n);
      else if (header.kind != Kind::DATA)
        body.insert(body.end(), bytes, bytes + n);
      have_ += n, bytes += n, count -= n;
      if (have_ == sizeof header) begun();
      if (have_ < sizeof header || have_ < sizeof header + header.body) continue;
      whole();
      have_ = 0;
      body.clear();
    }
  }
  bool inside_fragment() const { return have_ > sizeof header && header.kind == Kind::DATA; }

 private:
  u64 have_ = 0;
};
}  // namespace hx::sim
