// The functions of the C ABI: checks of arguments, of the process, and of exceptions.
#include <cstring>
#include <new>
#include <system_error>

#include "../wire.hpp"
#include "engine.hpp"
#include "ring_connection.hpp"
#include "socket_connection.hpp"

#pragma GCC visibility push(default)
#include "helixrt_native.h"

using namespace hx;

struct hx_engine {
  explicit hx_engine(const Options& options) : engine(options) {}
  const pid_t owner = getpid();
  Engine engine;
};

namespace {
// `work` with the engine: what it returns, or why it could not.
template <class F>
auto use(hx_engine* e, F&& work) noexcept -> decltype(work(e->engine)) {
  if (!e) return -EINVAL;
  if (getpid() != e->owner) return -ECHILD;
  try {
    return work(e->engine);
  } catch (const std::system_error& error) {
    return -error.code().value();
  } catch (...) {
    return -ENOMEM;
  }
}

constexpr i64 MOST_RAILS = 1 << 10;  // to one peer
constexpr const char* or_empty(const char* text) { return text ? text : ""; }

void write(char* into, i64 bytes, std::string_view text) {
  if (!into || bytes < 1) return;
  const std::size_t n = std::min(text.size(), std::size_t(bytes) - 1);
  std::memcpy(into, text.data(), n);
  into[n] = 0;
}

bool read(const hx_options& given, Options& options) {
  i64* const times[] = {&options.connect, &options.answer, &options.attempt, &options.retry, &options.rest, &options.longest_rest,
                        &options.steady, &options.acknowledge};
  const i64* from = &given.connect;
  for (i64* each : times) {
    if (*from < 0) return false;
    if (*from) *each = *from;
    from++;
  }
  u64* const sizes[] = {&options.eager_bytes, &options.keep_bytes, &options.eager_memory, &options.rail_bytes, &options.window_bytes,
                        &options.turn_bytes};
  for (u64* each : sizes) {
    if (*from < 0) return false;
    if (*from) *each = u64(*from);
    from++;
  }
  if (given.concurrent < 0 || given.concurrent > INT32_MAX || given.period < -1) return false;
  if (given.concurrent) options.concurrent = int(given.concurrent);
  if (given.period) options.period = std::max<i64>(given.period, 0);
  return true;
}
static_assert(offsetof(hx_options, connect) == sizeof(i64) && offsetof(hx_options, eager_bytes) == 9 * sizeof(i64));
}  // namespace

int32_t hx_abi(void) { return HX_ABI; }
int32_t hx_protocol(void) { return i32(PROTOCOL); }
const char* hx_build(void) {
  static const std::string text = std::string(__VERSION__) + ", " + instruction_set();
  return text.c_str();
}
int64_t hx_ring_bytes(void) { return i64(RingConnection::MEMORY_BYTES); }

// ---------------------------------------------------------------- engines and generations

hx_engine* hx_new(const hx_options* given) {
  Options options;
  errno = EINVAL;
  if (given && !read(*given, options)) return nullptr;
  try {
    return new hx_engine(options);
  } catch (const std::system_error& error) {
    errno = error.code().value();
  } catch (...) {
    errno = ENOMEM;
  }
  return nullptr;
}

void hx_free(hx_engine* e) {
  if (!e) return;
  if (getpid() == e->owner)
    delete e;
  else
    e->engine.abandon();
}

int32_t hx_begin(hx_engine* e, uint32_t generation, int32_t me, int32_t size, const int32_t* rails) {
  return use(e, [=](Engine& engine) -> i32 {
    if (size < 1 || me < 0 || me >= size || !rails || rails[me] != 0) return -EINVAL;
    for (i32 i = 0; i < size; i++)
      if (rails[i] < 0 || rails[i] > MOST_RAILS) return -EINVAL;
    return engine.begin(generation, me, std::vector<int>(rails, rails + size)), 0;
  });
}

int32_t hx_rail_up(hx_engine* e, int32_t peer, int32_t rail, uint32_t number, int32_t fd) {
  Descriptor owned(fd);
  return use(e, [&](Engine& engine) -> i32 {
    if (number < 1) return -EINVAL;
    return engine.rail_up(std::make_unique<SocketConnection>(std::move(owned), peer, rail), number);
  });
}

int32_t hx_rail_up_memory(hx_engine* e, int32_t peer, int32_t rail, uint32_t number, int32_t fd, int32_t memory, int32_t first) {
  Descriptor owned(fd);
  return use(e, [&](Engine& engine) -> i32 {
    if (number < 1 || (first != 0 && first != 1)) return -EINVAL;
    return engine.rail_up(std::make_unique<RingConnection>(std::move(owned), memory, first != 0, peer, rail), number);
  });
}

int32_t hx_rail_down(hx_engine* e, int32_t peer, int32_t rail, int32_t failure, const char* reason) {
  return use(e, [=](Engine& engine) -> i32 {
    if (failure < 0 || failure > i32(Failure::PEER_GONE)) return -EINVAL;
    return engine.with_rail(peer, rail, [=](Core& core) { core.rail_down(peer, rail, Failure(failure), or_empty(reason)); });
  });
}
int32_t hx_rail_slow(hx_engine* e, int32_t peer, int32_t rail) {
  return use(e, [=](Engine& engine) { return engine.with_rail(peer, rail, [=](Core& core) { core.rail_slow(peer, rail); }); });
}
int32_t hx_lose(hx_engine* e, int32_t peer, const char* reason) {
  return use(e, [=](Engine& engine) { return engine.with_rail(peer, 0, [=](Core& core) { core.lose(peer, or_empty(reason)); }); });
}

int32_t hx_abort(hx_engine* e, const char* cause) {
  return use(e, [=](Engine& engine) -> i32 { return engine.abort(or_empty(cause)), 0; });
}
void hx_abort_signal(hx_engine* e) {
  const int kept = errno;
  if (e && getpid() == e->owner) e->engine.abort_signal();
  errno = kept;
}
int32_t hx_finish(hx_engine* e, int64_t linger) {
  return use(e, [=](Engine& engine) { return engine.finish(std::max<i64>(linger, 0)); });
}

// ---------------------------------------------------------------- operations and messages

int64_t hx_plan(hx_engine* e, int32_t size, const int64_t* flat, int64_t count, const int64_t* after, const int64_t* after_begin,
                int64_t scratch_bytes, char* why, int64_t why_bytes) {
  write(why, why_bytes, "");
  return use(e, [=](Engine& engine) -> i64 {
    std::string text;
    std::unique_ptr<const Plan> plan;
    if (!after_begin || count < 0 || (count && !flat) || (count && after_begin[count] > 0 && !after))
      text = "an argument is missing";
    else
      plan = Plan::make(flat, count, after, after_begin, scratch_bytes, size, text);
    write(why, why_bytes, text);
    return plan ? engine.add_plan(std::move(plan), size) : -EINVAL;
  });
}
int32_t hx_plan_free(hx_engine* e, int64_t plan) {
  return use(e, [=](Engine& engine) { return engine.remove_plan(plan); });
}

int64_t hx_submit(hx_engine* e, const hx_call* call) {
  return use(e, [=](Engine& engine) -> i64 { return call ? engine.submit(*call) : -EINVAL; });
}
int32_t hx_wait(hx_engine* e, int64_t operation, int64_t timeout) {
  return use(e, [=](Engine& engine) { return engine.wait(operation, timeout); });
}
int32_t hx_status(hx_engine* e, int64_t operation) {
  return use(e, [=](Engine& engine) { return engine.status(operation); });
}

int32_t hx_node_done(hx_engine* e, int64_t operation, int32_t node) {
  return use(e, [=](Engine& engine) -> i32 { return engine.node_done(operation, node), 0; });
}

int32_t hx_send(hx_engine* e, int32_t peer, int64_t op, uint32_t index, const void* data, int64_t bytes) {
  return use(e, [=](Engine& engine) -> i32 {
    if (bytes < 0 || u64(bytes) > MESSAGE_BYTES || (bytes && !data)) return -EINVAL;
    return engine.message(peer, [=](Core& core) { return core.send(peer, {op, index}, data, u64(bytes)); });
  });
}
int32_t hx_receive(hx_engine* e, int32_t peer, int64_t op, uint32_t index, void* into, int64_t bytes) {
  return use(e, [=](Engine& engine) -> i32 {
    if (bytes < 0 || u64(bytes) > MESSAGE_BYTES || (bytes && !into)) return -EINVAL;
    return engine.message(peer, [=](Core& core) { return core.receive(peer, {op, index}, into, u64(bytes)); });
  });
}

// ---------------------------------------------------------------- events and figures

int32_t hx_events(hx_engine* e, hx_event* into, int32_t most) {
  return use(e, [=](Engine& engine) -> i32 { return into || most <= 0 ? engine.events(into, most) : -EINVAL; });
}
int32_t hx_event_fd(hx_engine* e) {
  return use(e, [](Engine& engine) { return engine.event_fd(); });
}
int32_t hx_ended(hx_engine* e, hx_event* into) {
  return use(e, [=](Engine& engine) -> i32 { return into ? engine.ended(into) : -EINVAL; });
}
int32_t hx_announce(hx_engine* e, int32_t yes) {
  return use(e, [=](Engine& engine) -> i32 { return engine.announce(yes != 0), 0; });
}
int32_t hx_counters(hx_engine* e, int32_t peer, int32_t rail, hx_rail_counters* into) {
  return use(e, [=](Engine& engine) -> i32 { return into ? engine.counters(peer, rail, into) : -EINVAL; });
}
int32_t hx_loop(hx_engine* e, hx_loop_counters* into) {
  return use(e, [=](Engine& engine) -> i32 { return into ? (engine.loop(into), 0) : -EINVAL; });
}
int64_t hx_print(hx_engine* e, char* into, int64_t bytes) {
  return use(e, [=](Engine& engine) -> i64 {
    const std::string text = engine.print();
    write(into, bytes, text);
    return into && bytes > 0 ? std::min(i64(text.size()), bytes - 1) : 0;
  });
}

// ---------------------------------------------------------------- arithmetic

int32_t hx_reduce(int32_t dtype, int32_t op, int64_t divisor, void* into, const void* left, const void* right, int64_t count) {
  const bool known = dtype >= 0 && dtype < i32(Dtype::DTYPES) && op >= 0 && op < i32(Operator::OPERATORS);
  if (!known || !can_reduce(Dtype(dtype), Operator(op)) || divisor < 1 || (divisor > 1 && !divides(Dtype(dtype)))) return -EINVAL;
  if (count < 0 || (count && (!into || !left || !right))) return -EINVAL;
  Reduction{Dtype(dtype), Operator(op), divisor}.apply(into, left, right, std::size_t(count), true);
  return 0;
}
int32_t hx_element_bytes(int32_t dtype) {
  return dtype >= 0 && dtype < i32(Dtype::DTYPES) ? element_bytes(Dtype(dtype)) : -EINVAL;
}
