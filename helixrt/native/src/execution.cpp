// Core's operations: the nodes of their plans, in any order that the plan allows.
#include <algorithm>
#include <cstring>

#include "core.hpp"

namespace hx {
namespace {
// READY: a send whose turn has not come. OUTSIDE: its owner carries it out.
enum NodeState : u8 { WAITING, READY, BEGUN, FINISHED, OUTSIDE };
}

i64 Core::submit(const Call& call) {
  now_ = io_.now();
  if (free_.empty()) {
    all_.push_back(std::make_unique<Operation>());
    free_.push_back(all_.back().get());
  }
  Operation* operation = free_.back();
  free_.pop_back();
  operation->number = next_operation_++;
  operation->call = call;
  operation->wire = call.name < 0 ? call.name : next_collective_++ | call.fingerprint;
  if (over() || ending_) {
    complete(operation, SKIPPED);
  } else if (call.name >= 0 && collectives_ >= options_.concurrent) {
    queued_.push_back(operation);
  } else {
    begin(operation);
    run_ready();
  }
  return operation->number;
}

void Core::begin(Operation* operation) {
  const Plan& plan = *operation->call.plan;
  running_.push_back(operation);
  collectives_ += operation->call.name >= 0;
  operation->left = i32(plan.nodes.size());
  operation->receives_left = plan.receive_count;
  operation->waits = plan.waits;
  operation->state.assign(plan.nodes.size(), WAITING);
  operation->turn.assign(links_.size(), 0);
  if (operation->scratch_bytes < u64(plan.scratch_bytes)) {
    operation->scratch.reset(new u8[plan.scratch_bytes]);
    operation->scratch_bytes = plan.scratch_bytes;
  }
  if (operation->call.name >= 0)
    if (const i64 theirs = agreement_.begin(operation->wire))
      return ended(-1, End::MISMATCH, "mismatch " + std::to_string(theirs) + " " + std::to_string(operation->wire));
  if (plan.nodes.empty()) return complete(operation, OK);
  for (i32 node : plan.roots) ready_.push_back({operation, node});
}

void Core::run_ready() {
  for (std::size_t i = 0; i < ready_.size(); i++) {  // grows meanwhile
    const Ready ready = ready_[i];
    start(ready.operation, ready.node);
  }
  ready_.clear();
}

void Core::start(Operation* operation, i32 number) {
  const Node& node = operation->call.plan->nodes[number];
  if (is_external(*operation, node)) {
    operation->state[number] = OUTSIDE;
    return io_.report({Event::NODE, -1, operation->number, number, 0, {}});
  }
  switch (node.kind) {
    case NodeKind::SEND:
      operation->state[number] = READY;
      return transmit(operation, node.peer);
    case NodeKind::RECEIVE: {
      operation->state[number] = BEGUN;
      Incoming wanted;
      wanted.name = {operation->wire, operation->call.first + node.index};
      wanted.length = node.bytes, wanted.into = memory(*operation, node, 0);
      if (node.flags & ON_ARRIVAL) wanted.left = memory(*operation, node, 1), wanted.reduction = &operation->call.reduction;
      wanted.last = node.flags & LAST;
      wanted.owner = operation, wanted.node = number;
      return links_[node.peer]->receive(std::move(wanted));
    }
    default:
      operation->state[number] = BEGUN;
      compute(*operation, node);
      return finish(operation, number);
  }
}

bool Core::is_external(const Operation& operation, const Node& node) const {
  if (!operation.call.external) return false;
  return node.kind == NodeKind::SEND ? node.at[0].space == 0 : node.kind != NodeKind::RECEIVE;
}

void Core::node_done(i64 operation, i32 number) {
  now_ = io_.now();
  auto found = std::find_if(running_.begin(), running_.end(), [&](const Operation* each) { return each->number == operation; });
  if (found == running_.end() || (*found)->state[number] != OUTSIDE) return;
  const Node& node = (*found)->call.plan->nodes[number];
  if (node.kind == NodeKind::SEND) {
    (*found)->state[number] = READY;
    transmit(*found, node.peer);
  } else {
    finish(*found, number);
  }
  run_ready();
}

void Core::transmit(Operation* operation, int peer) {  // the sends to one peer begin in the order of their index
  const Plan& plan = *operation->call.plan;
  const std::vector<i32>& order = plan.sends[peer];
  i32& turn = operation->turn[peer];
  while (turn < i32(order.size()) && operation->state[order[turn]] == READY) {
    const i32 number = order[turn++];
    const Node& node = plan.nodes[number];
    operation->state[number] = BEGUN;
    Outgoing message;
    message.name = {operation->wire, operation->call.first + node.index};
    message.data = memory(*operation, node, 0), message.length = node.bytes;
    message.owner = operation, message.node = number;
    message.prompt = plan.prompt[number] || (u64(node.bytes) > options_.keep_bytes && turn == i32(order.size()));
    if (!links_[peer]->send(std::move(message))) return;  // the link is over, and has told why
  }
}

void Core::compute(const Operation& operation, const Node& node) const {
  u8* into = memory(operation, node, 0);
  if (node.kind == NodeKind::COPY) {
    std::memmove(into, memory(operation, node, 2), node.bytes);
    return;
  }
  const Reduction& reduction = operation.call.reduction;
  reduction.apply(into, memory(operation, node, 1), memory(operation, node, 2), node.bytes / element_bytes(reduction.dtype),
                  node.flags & LAST);
  if (node.flags & TWICE) std::memcpy(memory(operation, node, 3), into, node.bytes);
}

void Core::finish(Operation* operation, i32 number) {
  const Plan& plan = *operation->call.plan;
  operation->state[number] = FINISHED;
  operation->receives_left -= plan.nodes[number].kind == NodeKind::RECEIVE;
  for (i32 i = plan.next_begin[number]; i < plan.next_begin[number + 1]; i++)
    if (!--operation->waits[plan.next[i]]) ready_.push_back({operation, plan.next[i]});
  if (!--operation->left) complete(operation, OK);
}

void Core::complete(Operation* operation, Status status) {
  auto found = std::find(running_.begin(), running_.end(), operation);
  if (found != running_.end()) {
    running_.erase(found);
    collectives_ -= operation->call.name >= 0;
  }
  free_.push_back(operation);
  io_.report({Event::DONE, -1, operation->number, status, 0, {}});
  while (!over() && !ending_ && !queued_.empty() && collectives_ < options_.concurrent) {
    Operation* next = queued_.front();
    queued_.pop_front();
    begin(next);
  }
}

// Where nothing but acknowledgements of short messages is missing, copies end the wait.
void Core::keep_short() {
  for (std::size_t i = running_.size(); i-- > 0;) {
    if (i >= running_.size()) continue;
    Operation* operation = running_[i];
    if (operation->receives_left) continue;
    const Plan& plan = *operation->call.plan;
    bool only_sends = true;
    for (std::size_t node = 0; node < plan.nodes.size() && only_sends; node++)
      only_sends = operation->state[node] == FINISHED || (operation->state[node] == BEGUN && plan.nodes[node].kind == NodeKind::SEND);
    if (!only_sends) continue;
    for (int peer = 0; peer < size(); peer++)
      if (links_[peer] && !plan.sends[peer].empty()) links_[peer]->keep_short(operation);
  }
}

std::string Core::silent_peers(const Operation& operation) const {
  std::vector<int> found;
  const Plan& plan = *operation.call.plan;
  for (std::size_t i = 0; i < plan.nodes.size(); i++)
    if (operation.state[i] == BEGUN && plan.nodes[i].kind <= NodeKind::RECEIVE) found.push_back(plan.nodes[i].peer);
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  std::string text;
  for (int peer : found) text += (text.empty() ? "" : ", ") + std::to_string(peer);
  return text;
}

u8* Core::memory(const Operation& operation, const Node& node, int which) const {
  const Place& place = node.at[which];
  const Call& call = operation.call;
  void* base = place.space == 0 ? call.source : place.space == 1 ? call.out : operation.scratch.get();
  return static_cast<u8*>(base) + place.offset;
}
}  // namespace hx
