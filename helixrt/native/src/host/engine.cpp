#include "engine.hpp"

#include <sstream>

namespace hx {
namespace {
void add(hx_rail_counters& sum, const Link& link, int number) {
  const Rail& rail = link.rails()[std::size_t(number)];
  sum.bytes_sent += rail.bytes_sent + (rail.up() ? rail.stream->bytes_sent : 0);
  sum.bytes_received += rail.bytes_received + (rail.up() ? rail.stream->bytes_received : 0);
  sum.frames_sent += rail.frames_sent + (rail.up() ? rail.stream->frames_sent : 0);
  sum.frames_received += rail.frames_received + (rail.up() ? rail.stream->frames_received : 0);
  sum.failures += rail.failures;
  sum.returns += rail.returns;
  if (number) return;  // these are the link's: counted at its first rail, so that sums over rails are right
  sum.fragments_again += i64(link.fragments_again());
  sum.duplicates += i64(link.duplicates());
}
bool has_rail(const Core& core, int peer, int rail) {
  return peer >= 0 && peer < core.size() && core.link(peer) && rail >= 0 && rail < int(core.link(peer)->rails().size());
}
}  // namespace

Engine::Engine(const Options& options) : options_(options), driver_(*this, mutex_, poller_) {}

Engine::~Engine() {
  {
    Hold hold(mutex_);
    if (current_) stop(*current_, "the engine was freed");
    driver_.await(hold, [this] { return (!current_ || current_->closed()) && !past_; }, later(monotonic_ns(), 2 * SECOND));
  }
  driver_.stop();
}

void Engine::abandon() {
  if (current_) current_->abandon();
  if (past_) past_->abandon();
  poller_.abandon();
  events_.abandon();
  driver_.abandon();
}

// ---------------------------------------------------------------- generations

void Engine::begin(u32 generation, int me, const std::vector<int>& rails) {
  Hold hold(mutex_);
  retire(past_);
  if (current_) {
    stop(*current_, "another generation begins");
    past_ = std::move(current_);
    if (past_->closed()) retire(past_);
  }
  aborting_ = false;
  ended_.reset();
  Generation::Owner& owner = *this;
  current_ = std::make_unique<Generation>(owner, poller_, options_, ++serial_, statuses_.next(), generation, me, rails);
  driver_.added(false);
}

// Ends it as an abort does. Afterwards no operation runs.
void Engine::stop(Generation& generation, std::string_view cause) {
  if (generation.open()) generation.use([&](Core& core) { return core.abort(End::ABORTED, cause), true; });
  fail_rest();
}

// Its figures are kept.
void Engine::retire(std::unique_ptr<Generation>& generation) {
  if (!generation) return;
  const Core& core = generation->core();
  for (int peer = 0; peer < core.size(); peer++)
    for (int rail = 0; core.link(peer) && rail < int(core.link(peer)->rails().size()); rail++)
      add(counters_[{peer, rail}], *core.link(peer), rail);
  system_calls_ += generation->system_calls;
  generation.reset();
}

i32 Engine::rail_up(std::unique_ptr<Connection> connection, u32 number) {
  Hold hold(mutex_);
  if (!current_) return -ENOTCONN;
  if (!has_rail(current_->core(), connection->peer, connection->rail)) return -EINVAL;
  if (!current_->open()) return -ECANCELED;
  const i32 error = current_->add(std::move(connection), number);
  driver_.added(false);
  return error;
}

i32 Engine::with_rail(int peer, int rail, const std::function<void(Core&)>& work) {
  Hold hold(mutex_);
  if (!current_) return -ENOTCONN;
  if (!has_rail(current_->core(), peer, rail)) return -EINVAL;
  if (!current_->open()) return 0;  // it ended in the meantime
  current_->use([&](Core& core) { return work(core), true; });
  driver_.added(false);
  return 0;
}

void Engine::abort(const char* cause) {
  Hold hold(mutex_);
  if (!current_) return;
  current_->use([&](Core& core) { return core.abort(End::ABORTED, cause), true; });
  driver_.added(false);
}

void Engine::abort_signal() {
  aborting_ = true;
  driver_.call();
}

i32 Engine::finish(i64 linger) {
  Hold hold(mutex_);
  if (!current_) return -ENOTCONN;
  if (current_->open()) {
    if (current_->core().running()) return -EBUSY;
    current_->use([](Core& core) { return core.close(), true; });
    current_->end(later(monotonic_ns(), linger));
    driver_.added(true);
  }
  const u32 serial = serial_;
  const auto done = [&] { return serial != serial_ || current_->closed(); };
  while (!done()) driver_.await(hold, done, NEVER);  // signals only disturb it: it ends in time
  return serial != serial_ || current_->all_said() ? 0 : -ETIMEDOUT;
}

// ---------------------------------------------------------------- operations

i64 Engine::add_plan(std::unique_ptr<const Plan> plan, int size) {
  Hold hold(mutex_);
  return plans_.add(std::move(plan), size);
}
i32 Engine::remove_plan(i64 plan) {
  Hold hold(mutex_);
  return plans_.remove(plan);
}

i64 Engine::submit(const hx_call& call) {
  Hold hold(mutex_);
  if (!current_) return -ENOTCONN;
  if (const i32 error = plans_.check(call, current_->core())) return error;
  if (!current_->open() && !current_->core().over()) return -ENOTCONN;
  if (!statuses_.room()) return -EAGAIN;
  const Reduction reduction{Dtype(call.dtype), Operator(call.op), call.divisor};
  const i64 deadline = call.timeout ? later(monotonic_ns(), call.timeout) : NEVER;
  const Call given{plans_.use(call.plan), call.source, call.out, reduction, deadline, call.fingerprint, call.name, call.first,
                   call.external != 0};
  const i64 number = statuses_.begin(call.plan, announce_ && !call.waits);
  current_->use([&](Core& core) { return core.submit(given), true; });
  driver_.added(call.waits);
  return number;
}

i32 Engine::wait(i64 operation, i64 timeout) {
  if (const i32 status = statuses_.get(operation)) return status;
  // A signal that comes while the caller is not in a system call does not end the wait: the limit lets its handler run soon.
  const i64 until = later(monotonic_ns(), timeout < 0 ? SECOND / 5 : std::min(timeout, SECOND / 5));
  Hold hold(mutex_);
  driver_.await(hold, [&] { return statuses_.get(operation) != RUNNING; }, until);
  return statuses_.get(operation);
}

void Engine::node_done(i64 operation, i32 node) {
  Hold hold(mutex_);
  if (!current_ || !current_->open() || operation < current_->first_operation) return;
  current_->use([&](Core& core) { return core.node_done(operation - current_->first_operation, node), true; });
  driver_.added(false);
}

i32 Engine::message(int peer, const std::function<bool(Core&)>& post) {
  Hold hold(mutex_);
  if (!current_ || !current_->open()) return -ENOTCONN;
  if (peer < 0 || peer >= current_->core().size() || !current_->core().link(peer)) return -EINVAL;
  bool posted = false;
  current_->use([&](Core& core) {
    current_->messages++;
    posted = post(core);
    current_->messages -= !posted;
    return true;
  });
  driver_.added(false);
  return posted ? 0 : -ENOTCONN;
}

void Engine::end_operation(i64 operation, Status status) {
  const i64 plan = statuses_.plan(operation);
  const bool announced = statuses_.announced(operation);
  if (!statuses_.end(operation, status)) return;
  plans_.leave(plan);
  driver_.changed();
  if (announced) events_.push({Event::DONE, -1, operation, status, 0, {}}, monotonic_ns());
}

// Those that an end has left, which no correct core does.
void Engine::fail_rest() {
  for (i64 n = std::max<i64>(0, statuses_.next() - Statuses::SLOTS); statuses_.running() && n < statuses_.next(); n++)
    end_operation(n, FAILED);
}

// ---------------------------------------------------------------- what generations tell

void Engine::happened(Generation& generation, Report&& report) {
  if (report.event == Event::DONE) return end_operation(generation.first_operation + report.op, Status(report.a));
  if (&generation == past_.get()) return;  // its end was told
  if (report.event == Event::NODE || report.event == Event::ARRIVED) report.op += generation.first_operation;
  if (report.event == Event::ENDED) ended_ = std::make_unique<Report>(report);
  events_.push(std::move(report), monotonic_ns());
}

void Engine::broke(Generation& generation, const char* why) {
  fail_rest();
  happened(generation, {Event::ENDED, -1, 0, i64(End::ABORTED), 0, std::string("the data plane failed: ") + why});
}

i32 Engine::events(hx_event* into, i32 most) {
  Hold hold(mutex_);
  return events_.take(into, most);
}
i32 Engine::ended(hx_event* into) {
  Hold hold(mutex_);
  if (!ended_) return 0;
  *into = as_event(*ended_, 0);
  return 1;
}
void Engine::announce(bool yes) {
  Hold hold(mutex_);
  announce_ = yes;
}

// ---------------------------------------------------------------- turns

bool Engine::turn(i64 now, std::span<const epoll_event> ready, bool all) {
  if (aborting_.exchange(false) && current_)
    current_->use([](Core& core) { return core.abort(End::ABORTED, "aborted by a signal handler"), true; });
  bool came = false;
  if (past_) came |= past_->turn(now, ready, all);
  if (past_ && past_->closed()) retire(past_), driver_.changed();
  if (current_) came |= current_->turn(now, ready, all);
  return came;
}
int Engine::sockets() const { return (current_ ? current_->sockets() : 0) + (past_ ? past_->sockets() : 0); }
i64 Engine::due() const { return std::min(current_ ? current_->due() : NEVER, past_ ? past_->due() : NEVER); }
bool Engine::waits() const { return aborting_ || past_ || (current_ && current_->waits()); }
bool Engine::may_sleep() {
  bool may = !aborting_;
  if (past_) may &= past_->may_sleep();
  if (current_) may &= current_->may_sleep();
  return may;
}
void Engine::awake() {
  if (past_) past_->awake();
  if (current_) current_->awake();
}

// ---------------------------------------------------------------- figures

i32 Engine::counters(int peer, int rail, hx_rail_counters* into) {
  Hold hold(mutex_);
  const auto earlier = counters_.find({peer, rail});
  const bool now = current_ && has_rail(current_->core(), peer, rail), past = past_ && has_rail(past_->core(), peer, rail);
  if (!now && !past && earlier == counters_.end()) return -EINVAL;
  *into = earlier == counters_.end() ? hx_rail_counters{} : earlier->second;
  if (now) add(*into, *current_->core().link(peer), rail);
  if (past) add(*into, *past_->core().link(peer), rail);
  return 0;
}

void Engine::loop(hx_loop_counters* into) {
  Hold hold(mutex_);
  *into = driver_.figures();
  into->system_calls += system_calls_ + (current_ ? current_->system_calls : 0) + (past_ ? past_->system_calls : 0);
}

std::string Engine::print() {
  Hold hold(mutex_);
  std::ostringstream text;
  text << driver_.print() << statuses_.next() << " operations, " << statuses_.running() << " run, " << events_.waiting() << " events, "
       << sockets() << " sockets\n";
  if (past_) text << "being ended:\n" << past_->core().print();
  if (current_) text << (current_->closed() ? "closed:\n" : "") << current_->core().print();
  return text.str();
}
}  // namespace hx
