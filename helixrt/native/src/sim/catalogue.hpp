// What ranks do in the simulated world, given by Python: plans, memory, and what a right result is.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "../plan.hpp"
#include "random.hpp"

namespace hx::sim {
enum class Form : i32 { COLLECTIVE, POINT, MESSAGE };  // POINT: a plan for two ranks; MESSAGE: two roles, sender and receiver

// The part of one rank. Source and out lie in one block of `bytes`.
struct Part {
  std::unique_ptr<const Plan> plan;  // null: this rank has no part, or sends or receives a message
  bool takes_part = false;
  bool in_place = false;  // source outside of out is undefined after the call
  i64 bytes = 0, source_at = 0, source_bytes = 0, out_at = 0, out_bytes = 0;
  // out[i] is the sum of the parts' source[indices[i]], of the parts that masks[i] has a bit for.
  std::vector<i64> masks, indices;
};

struct Shape {
  Form form{};
  int size = 0, element = 0;  // ranks; bytes of an element: 1 (u8), 4 (f32), 8 (i64)
  std::vector<Part> parts;
};

struct Catalogue {
  std::vector<std::unique_ptr<Shape>> shapes;

  std::vector<int> of(int size, Form form) const {
    std::vector<int> found;
    for (int i = 0; i < int(shapes.size()); i++)
      if (shapes[i]->form == form && (form == Form::MESSAGE || shapes[i]->size == size)) found.push_back(i);
    return found;
  }
};
}  // namespace hx::sim
