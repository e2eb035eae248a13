// The simulation's C ABI, for ctypes (simulation.py). Not a part of the data plane's library.
#include <atomic>
#include <mutex>
#include <thread>

#include "world.hpp"

using namespace hx;
using namespace hx::sim;
#define HX_SIM extern "C" __attribute__((visibility("default")))

namespace {
void put(const std::string& text, char* why, i64 why_bytes) {
  if (why_bytes <= 0) return;
  const std::size_t n = std::min(text.size(), std::size_t(why_bytes) - 1);
  std::memcpy(why, text.data(), n);
  why[n] = 0;
}
}  // namespace

HX_SIM Catalogue* hx_sim_new() { return new Catalogue; }
HX_SIM void hx_sim_free(Catalogue* catalogue) { delete catalogue; }
HX_SIM i64 hx_sim_fragment_bytes() { return i64(FRAGMENT_BYTES); }
HX_SIM const char* hx_sim_count_name(i32 index) { return index < i32(Count::COUNTS) ? COUNT_NAMES[index] : nullptr; }

// A new shape without parts. All parts are added before a run.
HX_SIM void hx_sim_shape(Catalogue* catalogue, i32 form, i32 size, i32 element) {
  auto shape = std::make_unique<Shape>();
  shape->form = sim::Form(form), shape->size = size, shape->element = element;
  catalogue->shapes.push_back(std::move(shape));
}

// The next part of the newest shape. `count` is below 0 where there is no plan; `layout`: whether it takes part, whether it is in place,
// bytes, source_at, source_bytes, out_at, out_bytes. -1: no plan, `why` says why.
HX_SIM i32 hx_sim_part(Catalogue* catalogue, const i64* flat, i64 count, const i64* after, const i64* after_begin, i64 scratch_bytes,
                       const i64* layout, const i64* masks, const i64* indices, char* why, i64 why_bytes) {
  Shape& shape = *catalogue->shapes.back();
  Part part;
  std::string wrong;
  if (count >= 0) part.plan = Plan::make(flat, count, after, after_begin, scratch_bytes, shape.size, wrong);
  part.takes_part = layout[0], part.in_place = layout[1], part.bytes = layout[2], part.source_at = layout[3];
  part.source_bytes = layout[4], part.out_at = layout[5], part.out_bytes = layout[6];
  if (part.plan && (part.plan->most[0] > part.source_bytes || part.plan->most[1] > part.out_bytes)) wrong = "memory is too short";
  put(wrong, why, why_bytes);
  const i64 elements = part.out_bytes / shape.element;
  part.masks.assign(masks, masks + elements), part.indices.assign(indices, indices + elements);
  shape.parts.push_back(std::move(part));
  return wrong.empty() ? 0 : -1;
}

// One seed. `faults`: a bit for each kind that may happen; `counts`: of Count::COUNTS, added to. 0, or 1: `why` says what is wrong.
HX_SIM i32 hx_sim_run(const Catalogue* catalogue, u64 seed, u32 faults, i64* counts, char* why, i64 why_bytes) {
  Counts found;
  const std::string wrong = World(*catalogue, seed, faults, found, true).run();
  for (std::size_t i = 0; i < found.of.size(); i++) counts[i] += found.of[i];
  put(wrong, why, why_bytes);
  return !wrong.empty();
}

// Seeds from `first` on, in `threads` threads. The least of the seeds that failed, or -1.
HX_SIM i64 hx_sim_many(const Catalogue* catalogue, u64 first, u64 count, i32 threads, u32 faults, i64* counts) {
  std::atomic<u64> next{first}, failed{first + count};
  std::mutex mutex;
  auto work = [&] {
    Counts found;
    for (u64 seed; (seed = next++) < failed;)
      if (!World(*catalogue, seed, faults, found, false).run().empty()) {
        u64 least = failed;
        while (seed < least && !failed.compare_exchange_weak(least, seed)) {
        }
      }
    const std::lock_guard<std::mutex> lock(mutex);
    for (std::size_t i = 0; i < found.of.size(); i++) counts[i] += found.of[i];
  };
  std::vector<std::thread> workers;
  for (i32 i = 1; i < threads; i++) workers.emplace_back(work);
  work();
  for (std::thread& worker : workers) worker.join();
  return failed == first + count ? -1 : i64(failed);
}
