#include "core.hpp"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

namespace hx {
Core::Core(Io& io, const Options& options, u32 generation, int me, const std::vector<int>& rails)
    : io_(io), options_(options), generation_(generation), me_(me), now_(io.now()) {
  for (int peer = 0; peer < int(rails.size()); peer++)
    links_.emplace_back(rails[peer] ? new Link(*this, io, options_, generation, peer, rails[peer], now_) : nullptr);
}

Core::~Core() = default;

// ---------------------------------------------------------------- rails

void Core::rail_up(int peer, int rail, int connection, u32 number) {
  now_ = io_.now();
  links_[peer]->rail_up(rail, connection, number, now_);
}

void Core::rail_down(int peer, int rail, Failure failure, std::string_view reason) {
  now_ = io_.now();
  links_[peer]->rail_down(rail, failure, reason, now_);
}

void Core::rail_slow(int peer, int rail) {
  now_ = io_.now();
  links_[peer]->rail_slow(rail, now_);
}

void Core::lose(int peer, std::string_view reason) {
  if (links_[peer]) links_[peer]->lose(reason);
}

bool Core::readable(int peer, int rail) {
  now_ = io_.now();
  const bool came = links_[peer]->readable(rail, now_);
  run_ready();
  return came;
}

void Core::writable(int peer, int rail) {
  now_ = io_.now();
  links_[peer]->writable(rail, now_);
}

// ---------------------------------------------------------------- single messages

bool Core::send(int peer, Name name, const void* data, u64 bytes) {
  if (over() || !links_[peer]) return false;
  Outgoing message;
  message.name = name, message.data = static_cast<const u8*>(data), message.length = bytes;
  return links_[peer]->send(std::move(message));
}

bool Core::receive(int peer, Name name, void* into, u64 bytes) {
  if (over() || !links_[peer]) return false;
  Incoming wanted;
  wanted.name = name, wanted.into = static_cast<u8*>(into), wanted.length = bytes;
  links_[peer]->receive(std::move(wanted));
  return true;
}

void Core::sent(int peer, const Outgoing& message) {
  if (message.owner) return finish(static_cast<Operation*>(message.owner), message.node);
  io_.report({Event::SENT, peer, message.name.op, message.name.index, 0, {}});
}

void Core::received(int peer, const Incoming& message) {
  if (auto* operation = static_cast<Operation*>(message.owner)) {
    if (operation->call.external) io_.report({Event::ARRIVED, peer, operation->number, message.node, 0, {}});
    return finish(operation, message.node);
  }
  io_.report({Event::RECEIVED, peer, message.name.op, message.name.index, 0, {}});
}

void Core::note(Report&& report) { io_.report(std::move(report)); }

std::string Core::differs(i64 op) {
  const i64 ours = agreement_.unexpected(op);
  if (!ours) return {};
  return "mismatch " + std::to_string(op) + " " + std::to_string(ours);  // for Python, which has the words (calls.difference)
}

i64 Core::awaited() const {
  i64 found = 0;
  for (const Operation* each : running_)
    if (each->call.name >= 0 && (!found || (each->wire & Agreement::NUMBER) < (found & Agreement::NUMBER))) found = each->wire;
  return found;
}

// ---------------------------------------------------------------- time and ends

void Core::tick() {
  now_ = io_.now();
  for (const Operation* each : running_) {
    if (now_ < each->call.deadline) continue;
    const std::string silent = silent_peers(*each);
    return abort(End::DEADLINE, "collective " + std::to_string(each->number) + " did not end in time; it waits for " +
                                    (silent.empty() ? "no rank" : "rank " + silent));
  }
  for (const Operation* each : queued_)
    if (now_ >= each->call.deadline)
      return abort(End::DEADLINE, "collective " + std::to_string(each->number) + " did not begin in time");
  for (auto& link : links_)
    if (link) link->tick(now_);
}

i64 Core::due() const {
  i64 due = ending_ ? 0 : NEVER;
  for (const Operation* each : running_) due = std::min(due, each->call.deadline);
  for (const Operation* each : queued_) due = std::min(due, each->call.deadline);
  for (const auto& link : links_)
    if (link && !over()) due = std::min(due, link->due());
  return due;
}

void Core::flush() {
  now_ = io_.now();
  do {
    run_ready();
    for (auto& link : links_)
      if (link) link->flush(now_);
    keep_short();
  } while (!ready_.empty());
  if (ending_) act_on_end();
}

bool Core::busy() const {
  return running() || std::any_of(links_.begin(), links_.end(), [](const auto& link) { return link && link->busy(); });
}

bool Core::unsaid() const {
  return std::any_of(links_.begin(), links_.end(), [](const auto& link) { return link && link->unsaid(); });
}

void Core::ended(int peer, End end, std::string cause) {
  if (!ending_ && !over()) ending_.reset(new Ending{end, peer, std::move(cause)});
}

// An operation that all others ended well ends well here, too: what they sent for it has come by now, and only the word of an end,
// on another connection, was faster.
void Core::act_on_end() {
  for (int peer = 0; peer < size(); peer++) {
    if (!links_[peer]) continue;
    for (int rail = 0; rail < int(links_[peer]->rails().size()); rail++)
      for (int turn = 0; turn < 64 && !links_[peer]->over() && links_[peer]->readable(rail, now_); turn++) run_ready();
  }
  run_ready();
  keep_short();
  run_ready();
  const std::unique_ptr<Ending> ending = std::move(ending_);
  if (over()) return;
  end_ = ending->end;
  for (auto& link : links_)
    if (link) link->abort(ending->cause);
  io_.report({Event::ENDED, ending->peer, 0, i64(ending->end), 0, ending->cause});
  for (Operation* each : std::exchange(running_, {})) complete(each, FAILED);
  for (Operation* each : std::exchange(queued_, {})) complete(each, SKIPPED);
  ready_.clear();
  for (auto& link : links_)
    if (link) link->flush(now_);
}

void Core::abort(End end, std::string_view cause) {
  if (over()) return;
  if (!ending_) ending_.reset(new Ending{end, -1, std::string(cause)});
  act_on_end();
}

void Core::close() {
  for (auto& link : links_)
    if (link && !over()) link->close();
}

std::string Core::print() const {
  std::ostringstream text;
  text << "rank " << me_ << " generation " << generation_ << " end " << int(end_) << " queued " << queued_.size() << "\n";
  for (const Operation* each : running_) {
    text << "  operation " << each->number << ": " << each->left << " nodes left:";
    for (std::size_t i = 0, said = 0; i < each->state.size() && said < 20; i++)
      if (each->state[i] != 3) text << " " << i << "=" << int(each->state[i]) << "(" << each->waits[i] << ")", said++;
    text << "\n";
  }
  for (const auto& link : links_)
    if (link) text << link->print();
  return text.str();
}
}  // namespace hx
