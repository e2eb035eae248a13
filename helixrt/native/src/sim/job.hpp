// One rank's part in one task: its memory with guards around it, and whether that is as it must be.
#pragma once
#include <cstring>
#include <string>
#include <vector>

#include "../reduce.hpp"
#include "catalogue.hpp"

namespace hx::sim {
struct Task {
  const Shape* shape = nullptr;
  int number = 0;
  std::vector<int> who;  // [part] the rank that has it
  i64 divisor = 1;       // of sums
  i64 fingerprint = 0;
  u32 first = 0;
  // The same as the message's name that `Core` gets, for all but collectives.
  i64 name() const { return shape->form == Form::COLLECTIVE ? 0 : -1 - number; }
};

class Job {
 public:
  Job(const Task& task, int part, u64 seed) : task_(&task), part_(part), seed_(seed) {
    const Part& p = this->part();
    shift_ = mixed(seed + u64(task.number) * 31 + u64(part)) % 16;
    memory_.assign(2 * GUARD + shift_ + u64(p.bytes), FILL);
    for (i64 i = 0; i < p.source_bytes / task.shape->element; i++) store(source() + i * task.shape->element, value(part, i));
    before_ = memory_;
  }

  const Task& task() const { return *task_; }
  const Part& part() const { return task_->shape->parts[std::size_t(part_)]; }
  u8* source() { return base() + part().source_at; }
  u8* out() { return base() + part().out_at; }
  Reduction reduction() const {
    const int element = task_->shape->element;
    return {element == 1 ? Dtype::U8 : element == 4 ? Dtype::F32 : Dtype::I64, Operator::SUM, element == 4 ? task_->divisor : 1};
  }

  bool begun = false, sent = false, received = false;  // messages: the event has come
  Status status = RUNNING;
  i64 deadline = NEVER;

  // It has ended: the memory is checked, then written over, and may not be touched any more. Returns what is wrong, or nothing.
  std::string end(Status how) {
    status = how;
    const std::string wrong = check(how);
    for (std::size_t i = 0; i < memory_.size(); i++) memory_[i] = u8(mixed(i + seed_) >> 8);
    after_ = memory_;
    return wrong;
  }
  std::string untouched() const { return status == RUNNING || memory_ == after_ ? "" : "memory was written after the end"; }

 private:
  static constexpr u64 GUARD = 64;
  static constexpr u8 FILL = 0xc3;
  u8* base() { return memory_.data() + GUARD + shift_; }

  i64 value(int part, i64 index) const {
    return i64(mixed(seed_ * 7919 + u64(task_->number) * 104729 + u64(part) * 1000003 + u64(index)) % 201) - 100;
  }
  void store(u8* at, i64 number) const {
    const float real = float(number);
    const u8 byte = u8(number);
    const int element = task_->shape->element;
    std::memcpy(at, element == 1 ? static_cast<const void*>(&byte) : element == 4 ? static_cast<const void*>(&real) : &number,
                std::size_t(element));
  }
  void store_result(u8* at, i64 i) const {
    const Part& p = part();
    const std::size_t k = std::size_t(i);
    i64 sum = 0;
    for (int each = 0; each < task_->shape->size; each++)
      if (p.masks[k] >> each & 1) sum += value(each, p.indices[k]);
    const bool divided = (p.masks[k] & (p.masks[k] - 1)) && reduction().divisor > 1;
    if (!divided) return store(at, sum);
    const float mean = float(sum) / float(reduction().divisor);  // exact: the divisors are powers of two
    std::memcpy(at, &mean, sizeof mean);
  }

  std::string check(Status how) {
    if (how == OK) {
      const Part& p = part();
      u8* expected = before_.data() + GUARD + shift_;
      if (p.in_place)  // the rest of the source is undefined
        std::memcpy(expected + p.source_at, source(), std::size_t(p.source_bytes));
      for (std::size_t i = 0; i < p.masks.size(); i++)
        store_result(expected + p.out_at + i64(i) * task_->shape->element, i64(i));
    } else if (how == FAILED) {
      const Part& p = part();
      u8* expected = before_.data() + GUARD + shift_;
      std::memcpy(expected + p.out_at, out(), std::size_t(p.out_bytes));
      if (p.in_place) std::memcpy(expected + p.source_at, source(), std::size_t(p.source_bytes));
    }
    for (std::size_t i = 0; i < memory_.size(); i++) {
      if (memory_[i] == before_[i]) continue;
      const i64 at = i64(i) - i64(GUARD + shift_);
      const Part& p = part();
      const bool result = at >= p.out_at && at < p.out_at + p.out_bytes;
      return std::string(result ? "a wrong result" : "memory outside of the result was written") + " at byte " +
             std::to_string(result ? at - p.out_at : at);
    }
    return {};
  }

  const Task* task_;
  int part_;
  u64 seed_, shift_ = 0;
  std::vector<u8> memory_, before_, after_;
};
}  // namespace hx::sim
