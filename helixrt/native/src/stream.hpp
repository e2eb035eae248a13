// Frames on one connection, in both directions.
#pragma once
#include <deque>
#include <memory>
#include <vector>

#include "inbox.hpp"
#include "io.hpp"
#include "outbox.hpp"
#include "wire.hpp"

namespace hx {
class Stream {
 public:
  struct Frames {  // what comes
    virtual ~Frames() = default;
    virtual Partial* fragment(const Header& header) = 0;  // begins; null: drop it
    virtual void fragment_ended(const Header& header, Partial* partial) = 0;
    virtual void frame(const Header& header, const u8* body) = 0;
    virtual void garbage(std::string_view what) = 0;  // no frame of a peer
    virtual bool stopped() const = 0;                  // asked after each of these: read no more
  };

  Stream(Io& io, Inbox& inbox, const Options& options, int connection)
      : connection(connection), io_(io), inbox_(inbox), options_(options), ahead_(new u8[AHEAD + LITTLE]) {}

  // All that has come, up to a turn's share. Returns the bytes, or -errno when the connection is broken.
  i64 read(Frames& to);
  void leave();  // it broke: a fragment on its way ends here

  void say(const Header& header, const void* body);  // goes before all fragments but one that is partly written
  void give(Flight* flight);
  void let_go(Flight* flight);  // it is acknowledged: its memory is not read any more
  void cut();                   // the same of all; what is partly written is completed from a copy
  // As much as the connection takes, up to a turn's share. Returns the bytes, or -errno. `floor` goes with each fragment.
  i64 write(u64 floor);

  bool idle() const { return words_.size() == words_written_ && queue_.empty(); }
  u64 queued() const { return queued_; }
  const std::deque<Flight*>& queue() const { return queue_; }
  u64 floor_said = 0;  // the newest that has gone with a fragment
  const int connection;
  bool want_write = false;
  i64 frames_sent = 0, frames_received = 0, bytes_sent = 0, bytes_received = 0;

 private:
  static constexpr u64 AHEAD = 128 << 10, LITTLE = sizeof(Header) + CONTROL_BYTES, GATHER = 512 << 10, PIECE = 1 << 20;
  static constexpr u64 LONG = 64 << 10;

  bool parse(Frames& to);
  void begin(Frames& to, const Header& header);
  void took(Frames& to, u64 bytes);
  void detach_front();
  u64 front_bytes() const { return sizeof(Header) + queue_.front()->header.body; }

  Io& io_;
  Inbox& inbox_;
  const Options options_;
  // Reading. What is read ahead lies in ahead_[from_, to_); behind a header of a long fragment little is, since that is copied.
  std::unique_ptr<u8[]> ahead_;
  u64 from_ = 0, to_ = 0, limit_ = AHEAD;
  bool inside_ = false;  // a fragment
  Header header_;
  Partial* partial_ = nullptr;
  u64 position_ = 0;  // in it
  // Writing
  std::vector<u8> words_;
  u64 words_written_ = 0;
  std::deque<Flight*> queue_;
  u64 front_written_ = 0, queued_ = 0;
};
}  // namespace hx
