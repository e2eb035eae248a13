// Two engines in one process, over socket pairs or shared memory: several threads of each submit, and wait with short timeouts
// or none, while signals come and generations are aborted, finished and begun again. For the sanitizers; `handoff SECONDS [SEED]`.
//
//   SRC="src/stress/handoff.cpp src/*.cpp src/host/*.cpp"; FLAGS="-std=c++20 -g -O1 -Iinclude -pthread"   # in helixrt/native
//   g++ $FLAGS -fsanitize=address,undefined -fno-sanitize-recover=all $SRC -o handoff && ./handoff 60
//   g++ $FLAGS -fsanitize=thread $SRC -o handoff && TSAN_OPTIONS=halt_on_error=1 ./handoff 60
#include <helixrt_native.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace {
constexpr int THREADS = 3, RAILS = 2;
constexpr int64_t SHORT = 4'096, LONG = 3 << 20;
enum How { ABORT, ABORT_SIGNAL, BEGIN, FINISH, LOSE, HOWS };

std::atomic<int64_t> progress{0};
std::atomic<hx_engine*> engines[2];

void require(bool good, const char* what, int64_t value = 0) {
  if (good) return;
  std::fprintf(stderr, "%s: %lld\n", what, static_cast<long long>(value));
  std::abort();
}
#define REQUIRE(condition, value) require(condition, #condition, value)

void connect_rail(int rail, uint32_t number, bool memory) {
  int ends[2], file = memory ? memfd_create("ring", MFD_CLOEXEC | MFD_ALLOW_SEALING) : -1;
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0 && (!memory || ftruncate(file, hx_ring_bytes()) == 0), rail);
  for (int me : {0, 1}) {
    const int error = memory ? hx_rail_up_memory(engines[me], !me, rail, number, ends[me], file, me)
                             : hx_rail_up(engines[me], !me, rail, number, ends[me]);
    REQUIRE(error == 0, error);
  }
  if (memory) close(file);
}

int64_t plan(hx_engine* engine, int me, int64_t bytes) {  // out = source + that of the other
  const int64_t flat[2][13] = {{0, !me, 0, 0, bytes, 0, 0}, {1, !me, 0, 3, bytes, 1, 0, 0, 0}}, begin[3] = {};
  char why[200];
  const int64_t number = hx_plan(engine, 2, flat[0], 2, nullptr, begin, 0, why, sizeof why);
  require(number >= 0, why, number);
  return number;
}

// The same messages as the thread of this number at the other engine, `rounds` of them or until the generation ends.
void work(int me, int number, const int64_t* plans, int rounds, unsigned seed) {
  std::mt19937 random(seed);
  hx_engine* engine = engines[me];
  std::vector<float> source[2], out[2];
  for (int round = 0; round < rounds; round++, progress++) {
    int64_t operations[2];
    for (int i : {0, 1}) {  // the sizes agree at both ends, since they follow from the round
      const bool is_long = (round * 2 + i + number) % 7 == 0;
      source[i].assign((is_long ? LONG : SHORT) / 4, float(me + 1 + round % 100)), out[i].assign(source[i].size(), 0);
      const int64_t bytes = is_long ? LONG : SHORT;
      const hx_call call{plans[is_long], source[i].data(), out[i].data(), bytes, bytes, 11, 0, 1, int64_t(20e9), 0, -1 - number,
                         uint32_t(round * 2 + i), uint32_t(i && random() % 2)};
      operations[i] = hx_submit(engine, &call);
      REQUIRE(operations[i] >= 0, operations[i]);
    }
    for (const int first = int(random() % 2); int i : {first, 1 - first}) {
      int status = 0;
      while (!status) status = hx_wait(engine, operations[i], random() % 3 ? -1 : int64_t(random() % 300'000));
      REQUIRE(status > 0 && status == hx_status(engine, operations[i]), status);
      if (status != 1) rounds = 0;
      for (std::size_t j = 0; status == 1 && j < out[i].size(); j += 511) REQUIRE(out[i][j] == float(3 + 2 * (round % 100)), round);
    }
    if (random() % 4 == 0) usleep(random() % 200);
    if (random() % 1000 == 0) usleep(30'000);  // longer than the thread is parked
  }
}

int run_generation(uint32_t generation, std::mt19937& random) {
  const How how = How(random() % HOWS);
  const int32_t rails[2][2] = {{0, RAILS}, {RAILS, 0}};
  for (int me : {0, 1}) REQUIRE(hx_begin(engines[me], generation, me, 2, rails[me]) == 0, me);
  for (int rail = 0; rail < RAILS; rail++) connect_rail(rail, 1, random() % 2);
  int64_t plans[2][2];
  std::vector<std::thread> threads;
  for (int me : {0, 1})
    for (int is_long : {0, 1}) plans[me][is_long] = plan(engines[me], me, is_long ? LONG : SHORT);
  const int rounds = how == FINISH ? 20 : 1'000'000;
  for (int me : {0, 1})
    for (int number = 0; number < THREADS; number++) threads.emplace_back(work, me, number, plans[me], rounds, unsigned(random()));
  for (int i = int(random() % 100); i >= 0; i--) {
    pthread_kill(threads[random() % threads.size()].native_handle(), SIGUSR1);
    usleep(random() % 1000);
  }
  const int me = int(random() % 2);
  if (how == BEGIN) REQUIRE(hx_begin(engines[me], generation + 1, me, 2, rails[me]) == 0, me);
  if (how == ABORT || how == BEGIN) REQUIRE(hx_abort(engines[me], "a test") == 0, me);
  if (how == ABORT_SIGNAL) hx_abort_signal(engines[me]);
  if (how == LOSE) REQUIRE(hx_lose(engines[me], !me, "a test") == 0, me);
  for (std::thread& each : threads) each.join();
  if (how == FINISH) {
    std::thread other([] { REQUIRE(hx_finish(engines[1], int64_t(5e9)) == 0, 1); });
    REQUIRE(hx_finish(engines[0], int64_t(5e9)) == 0, 0);
    other.join();
  }
  for (int end : {0, 1}) {
    hx_event events[8];
    int ends = 0;
    for (int n; (n = hx_events(engines[end], events, 8)) > 0;)
      for (int i = 0; i < n; i++) ends += events[i].event == 4;
    REQUIRE(ends == (how == FINISH ? 0 : how == BEGIN && end == me ? 2 : 1), ends);
    for (int64_t each : plans[end]) REQUIRE(hx_plan_free(engines[end], each) == 0, each);
  }
  return how;
}
}  // namespace

int main(int argc, char** argv) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(argc > 1 ? atoi(argv[1]) : 10);
  std::mt19937 random(argc > 2 ? unsigned(atoi(argv[2])) : 1);
  signal(SIGUSR1, [](int) {});
  std::thread([] {
    for (int64_t seen = -1; seen != progress; usleep(15'000'000)) seen = progress;
    static char text[100'000];
    for (hx_engine* each : {engines[0].load(), engines[1].load()}) hx_print(each, text, sizeof text), std::fputs(text, stderr);
    require(false, "no progress", progress);
  }).detach();
  int counts[HOWS] = {};
  for (uint32_t generation = 1; std::chrono::steady_clock::now() < until; generation += 2) {
    for (auto& each : engines)
      if (!each || random() % 4 == 0) hx_free(each), each = hx_new(nullptr), REQUIRE(each != nullptr, 0);
    counts[run_generation(generation, random)]++, progress++;
  }
  for (auto& each : engines) hx_free(each);
  std::printf("%lld rounds; ends:", static_cast<long long>(progress));
  for (int each : counts) std::printf(" %d", each);
  std::printf("\n");
}
