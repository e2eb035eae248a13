// One rank's pair with one peer in one generation, over several rails.
//
// Failover needs no agreement beyond sequence numbers: when a rail fails, the peer is asked on another one what it has (RESUME), and
// what it has not is sent again there. Frames that come twice, also in part, count once (`Inbox`). Acknowledgements travel with
// fragments, and alone where somebody waits for one. A rail that is slow is left in the same way as one that comes back is taken:
// new frames go elsewhere, what is on it drains, it rests, a probe tells that it works.
#pragma once
#include <memory>
#include <vector>

#include "inbox.hpp"
#include "io.hpp"
#include "outbox.hpp"
#include "paths.hpp"
#include "rail.hpp"
#include "stream.hpp"

namespace hx {
class Link final : private Stream::Frames {
 public:
  struct Owner {
    virtual void sent(int peer, const Outgoing& message) = 0;
    virtual void received(int peer, const Incoming& message) = 0;
    virtual void ended(int peer, End end, std::string cause) = 0;  // the link is over; it says nothing more
    virtual void note(Report&& report) = 0;
    virtual std::string differs(i64 op) = 0;  // a name that was not expected: the difference if it is another call; else empty
    virtual i64 awaited() const = 0;          // the oldest collective that runs; 0: none

   protected:
    ~Owner() = default;
  };

  Link(Owner& owner, Io& io, const Options& options, u32 generation, int peer, int rails, i64 now);

  void rail_up(int rail, int connection, u32 number, i64 now);
  void rail_down(int rail, Failure failure, std::string_view reason, i64 now);
  void rail_slow(int rail, i64 now);
  bool readable(int rail, i64 now);
  void writable(int rail, i64 now);

  bool send(Outgoing&& message);
  void receive(Incoming&& message);
  void keep_short(const void* owner);  // copies the short messages of `owner`, so that they are sent for it

  void abort(std::string_view cause);  // tells the peer; memory of callers is not touched any more
  void close();                                   // in order
  void lose(std::string_view reason);
  void tick(i64 now);
  void flush(i64 now);
  i64 due() const;

  bool over() const { return over_; }
  bool unsaid() const;  // bytes wait to be written
  bool unfinished() const { return inbox_.waits() || outbox_.unfinished(); }
  bool busy() const { return inbox_.waits() || outbox_.waits(); }
  int connection(int rail) const { return rails_[rail].up() ? rails_[rail].stream->connection : -1; }
  const std::vector<Rail>& rails() const { return rails_; }
  u64 duplicates() const { return inbox_.duplicates; }
  u64 fragments_again() const { return outbox_.fragments_again; }
  std::string print() const;

 private:
  // Stream::Frames, of the rail that is being read
  Partial* fragment(const Header& header) override;
  void fragment_ended(const Header& header, Partial* partial) override;
  void frame(const Header& header, const u8* body) override;
  void garbage(std::string_view what) override;
  bool stopped() const override { return !garbage_.empty(); }

  // traffic
  void counters(const Header& header, const u8* body);
  void acknowledged(u64 floor, const u64* ranges, u64 count);
  void names(const Header& header, const u8* body);
  void say(Rail& rail, Kind kind, i64 op = 0, u8 flags = 0, const void* body = nullptr, u64 bytes = 0);
  void say_counters(Rail& rail, Kind kind, i64 op, u8 flags);
  void pump();
  void hop();
  void write(Rail& rail);
  bool owes() const;
  void tell(Outgoing& message);
  void farewell();
  void note_farewell();

  // rails
  void fail(Rail& rail, Failure failure, std::string_view reason);
  void serve(Rail& rail);
  void probe(Rail& rail);
  void recover();
  void left(Rail& rail, i64 failure, std::string_view reason);
  void pause(Rail& rail);
  bool draining(const Rail& rail);
  Rail* carrier(bool room);
  int usable() const;
  int number(const Rail& rail) const { return int(&rail - rails_.data()); }
  void end(End end, std::string cause);
  void lost(std::string_view reason);

  Owner& owner_;
  Io& io_;
  const Options& options_;
  const u32 generation_;
  const int peer_;
  i64 now_, began_, heard_ = 0, ticked_;
  i64 failed_ = 0;  // when a rail last did
  Inbox inbox_;
  Outbox outbox_;
  std::vector<Rail> rails_;
  int reading_ = 0;
  std::string garbage_;  // what came on it that is no frame
  bool over_ = false, closed_ = false;  // closed: the peer has, in order
  bool closing_ = false, said_farewell_ = false;  // this end closes
  u64 farewell_ = 0;                    // the sequence number of its BYE
  // acknowledgements that this end owes
  bool prompt_ = false;
  u64 said_floor_ = 0, said_taken_ = 0, said_consumed_ = 0;
  i64 acknowledge_at_ = NEVER;
  // failover
  std::vector<Flight*> lost_;  // on rails that failed; the peer may have them
  i64 resume_ = 0, resume_until_ = 0;
  i64 resume_least_ = 1;  // the first RESUME that was said after the newest of lost_ was added: its answer says all
  bool resuming_ = false;
  i64 probes_ = 0;
  std::unique_ptr<Paths> paths_;  // null where rails are no paths
  std::vector<Flight*> held_;     // reused
  std::vector<Outgoing*> ended_;  // reused
};
}  // namespace hx
