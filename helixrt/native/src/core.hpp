// The data plane of one rank in one generation: links to its peers, and the plans that run over them.
//
// A class without threads, sockets and clock. All that it does outside its own memory goes through `Io`. One caller at a time.
// Deterministic: the same calls and the same answers of Io give the same calls of Io. The owner passes on what happens
// (rails that come and break, readable and writable connections, submitted work), calls `tick` when `due` has come, and `flush`
// after each batch of calls: frames leave, and reports come, in `flush`, so that many events cost one system call.
//
// Rules:
// - A message arrives exactly once, whole, in the memory given to `receive` or to a plan; fragments that were sent again on
//   another rail add nothing twice (`Inbox`).
// - The first cause ends the generation and stays. After Event::ENDED no memory of a caller is read or written.
// - An operation whose last bytes have come when a peer ends still ends well.
#pragma once
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "agreement.hpp"
#include "io.hpp"
#include "link.hpp"
#include "plan.hpp"
#include "reduce.hpp"

namespace hx {
struct Call {  // one operation
  const Plan* plan = nullptr;  // lives until Event::DONE
  void* source = nullptr;      // the same as `out` for a call in place
  void* out = nullptr;
  Reduction reduction;
  i64 deadline = NEVER;
  i64 fingerprint = 0;  // of a collective: what all ranks must agree on, a part of its messages' names (calls.py)
  i64 name = 0;         // below 0: a point-to-point operation, whose messages both ends call (name, first + index)
  u32 first = 0;
  bool external = false;  // reductions and copies are the owner's, and sends of the source wait for its leave (Event::NODE)
};

struct Operation {
  i64 number = 0;
  i64 wire = 0;  // how its messages are called
  Call call;
  i32 left = 0, receives_left = 0;  // nodes that are not done
  bool begun = false;
  std::vector<i32> waits, turn;  // [node] nodes it still waits for; [peer] the next message to send
  std::vector<u8> state;
  std::unique_ptr<u8[]> scratch;
  u64 scratch_bytes = 0;
};

class Core final : private Link::Owner {
 public:
  // `rails`: how many there are to each rank (0: no link, as to itself).
  Core(Io& io, const Options& options, u32 generation, int me, const std::vector<int>& rails);
  ~Core();

  // ---- rails
  void rail_up(int peer, int rail, int connection, u32 number);  // connection number `number` of this rail, from 1; both ends count alike
  void rail_down(int peer, int rail, Failure failure, std::string_view reason);  // it broke, or could not be restored
  void rail_slow(int peer, int rail);                                            // leave it: it works, but is slow
  void lose(int peer, std::string_view reason);                                  // known from elsewhere: the peer is gone
  bool readable(int peer, int rail);  // reads; false if nothing had come
  void writable(int peer, int rail);

  // ---- work
  i64 submit(const Call& call);  // the number of the operation, from 0; Event::DONE follows, also when the generation is over
  void node_done(i64 operation, i32 node);  // of external work; nothing if the operation is over
  bool send(int peer, Name name, const void* data, u64 bytes);  // a single message; false: no such peer, or the generation is over
  bool receive(int peer, Name name, void* into, u64 bytes);

  // ---- time and ends
  void tick();
  void flush();
  i64 due() const;
  void abort(End end, std::string_view cause);  // tells the peers; the first one counts
  void close();        // in order: peers learn that nothing else comes; nothing may be unfinished
  bool unsaid() const;  // bytes that are not written yet: of close or abort, too

  // ---- for those who look on
  bool over() const { return end_ != End::NONE; }
  bool running() const { return !running_.empty() || !queued_.empty(); }
  bool busy() const;  // something is running, or a message is on its way
  const Link* link(int peer) const { return links_[peer].get(); }
  int size() const { return int(links_.size()); }
  std::string print() const;  // the state, for a failing schedule

 private:
  struct Ready {
    Operation* operation;
    i32 node;
  };
  // Link::Owner
  void sent(int peer, const Outgoing& message) override;
  void received(int peer, const Incoming& message) override;
  void ended(int peer, End end, std::string cause) override;
  void note(Report&& report) override;
  std::string differs(i64 op) override;
  i64 awaited() const override;

  void begin(Operation* operation);
  void start(Operation* operation, i32 node);
  void transmit(Operation* operation, int peer);
  bool is_external(const Operation& operation, const Node& node) const;
  void compute(const Operation& operation, const Node& node) const;
  void finish(Operation* operation, i32 node);
  void run_ready();
  void complete(Operation* operation, Status status);
  void keep_short();
  void act_on_end();
  std::string silent_peers(const Operation& operation) const;
  u8* memory(const Operation& operation, const Node& node, int which) const;

  Io& io_;
  const Options options_;
  const u32 generation_;
  const int me_;
  i64 now_;
  End end_ = End::NONE;
  struct Ending {
    End end;
    int peer;
    std::string cause;
  };
  std::unique_ptr<Ending> ending_;  // known, but what has come by now is taken first
  Agreement agreement_;
  std::vector<std::unique_ptr<Link>> links_;  // [rank]
  i64 next_operation_ = 0;
  i64 next_collective_ = 0;
  int collectives_ = 0;  // that run
  std::vector<Operation*> running_;
  std::deque<Operation*> queued_;
  std::vector<std::unique_ptr<Operation>> all_;
  std::vector<Operation*> free_;
  std::vector<Ready> ready_;
};
}  // namespace hx
