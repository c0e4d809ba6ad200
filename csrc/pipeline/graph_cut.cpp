#include "pipeline/graph_cut.h"

#include <algorithm>

namespace pydist {

namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::TraceableFunction;

constexpr size_t kSmallestTable = 256;

size_t slot_of(const Node* node, size_t table_size) {
  const uint64_t hash = (reinterpret_cast<uintptr_t>(node) >> 4) * 0x9E3779B97F4A7C15ull;
  return (hash >> 32) & (table_size - 1);
}

// Derivatives that torch generates compute per edge what the engine asks for; others need not.
bool is_custom(const Node* node) {
  return node->num_outputs() > 0 && dynamic_cast<const TraceableFunction*>(node) == nullptr;
}

bool must_run_once(const Node* node) { return is_custom(node) || !node->post_hooks().empty(); }

}  // namespace

GraphCut::GraphCut(const edge_list& roots, const edge_list& inputs) {
  walk(roots);
  input_side_.assign(nodes_.size(), 0);
  for (const Edge& input : inputs) {
    const int index = find(input.function.get());
    if (index != kNone) input_side_[index] = 1;
  }
  spread_input_side();
  while (move_below_opaque()) spread_input_side();
  collect();
  look_for_obstacles();
}

bool GraphCut::is_input_side(const Node* node) const {
  const int index = find(node);
  return index != kNone && input_side_[index] != 0;
}

int GraphCut::find(const Node* node) const {
  for (size_t slot = slot_of(node, table_.size());; slot = (slot + 1) & (table_.size() - 1)) {
    const int32_t index = table_[slot];
    if (index == kNone || nodes_[index] == node) return index;
  }
}

int GraphCut::find_or_add(Node* node) {
  size_t slot = slot_of(node, table_.size());
  while (table_[slot] != kNone) {
    if (nodes_[table_[slot]] == node) return table_[slot];
    slot = (slot + 1) & (table_.size() - 1);
  }
  const int index = static_cast<int>(nodes_.size());
  table_[slot] = index;
  nodes_.push_back(node);
  first_child_.push_back(static_cast<uint32_t>(children_.size()));
  children_.resize(children_.size() + node->num_outputs(), kNone);
  if (nodes_.size() * 2 > table_.size()) grow_table();
  return index;
}

void GraphCut::grow_table() {
  table_.assign(table_.size() * 2, kNone);
  for (size_t index = 0; index < nodes_.size(); ++index) {
    size_t slot = slot_of(nodes_[index], table_.size());
    while (table_[slot] != kNone) slot = (slot + 1) & (table_.size() - 1);
    table_[slot] = static_cast<int32_t>(index);
  }
}

// Depth first and without recursion: graphs may be deeper than the stack.
void GraphCut::walk(const edge_list& roots) {
  struct Place {
    int32_t node;
    uint32_t next_edge;
  };
  table_.assign(kSmallestTable, kNone);
  std::vector<Place> path;
  for (const Edge& root : roots) {
    const size_t num_known = nodes_.size();
    const int32_t top = find_or_add(root.function.get());
    if (nodes_.size() > num_known) path.push_back({top, 0});
    while (!path.empty()) {
      const int32_t index = path.back().node;
      const edge_list& edges = nodes_[index]->next_edges();
      if (path.back().next_edge == edges.size()) {
        bottom_up_.push_back(index);
        path.pop_back();
        continue;
      }
      const uint32_t edge = path.back().next_edge++;
      if (!edges[edge].is_valid()) continue;
      const size_t num_before = nodes_.size();
      const int32_t child = find_or_add(edges[edge].function.get());
      children_[first_child_[index] + edge] = child;
      if (nodes_.size() > num_before) path.push_back({child, 0});
    }
  }
}

GraphCut::Children GraphCut::children(int index) const {
  const int32_t* first = children_.data() + first_child_[index];
  return {first, first + nodes_[index]->num_outputs()};
}

void GraphCut::spread_input_side() {
  for (const int32_t index : bottom_up_) {
    for (const int32_t child : children(index)) {
      if (child != kNone && input_side_[child] != 0) input_side_[index] = 1;
    }
  }
}

bool GraphCut::leads_to_weight_side(int index) const {
  const Children all = children(index);
  return std::any_of(all.begin(), all.end(),
                     [this](int32_t child) { return child != kNone && input_side_[child] == 0; });
}

// Whether anything changed its side.
bool GraphCut::move_below_opaque() {
  bool moved = false;
  for (const int32_t index : bottom_up_) {
    if (input_side_[index] == 0 || !leads_to_weight_side(index)) continue;
    if (!must_run_once(nodes_[index])) continue;
    move_below(index);
    moved = true;
  }
  return moved;
}

void GraphCut::move_below(int top) {
  std::vector<int32_t> pending{top};
  while (!pending.empty()) {
    const int32_t index = pending.back();
    pending.pop_back();
    for (const int32_t child : children(index)) {
      if (child == kNone || input_side_[child] != 0) continue;
      input_side_[child] = 1;
      if (nodes_[child]->num_outputs() == 0) {
        leaves_of_input_side_.push_back(nodes_[child]->getptr());
      }
      pending.push_back(child);
    }
  }
}

// A node is run only after all that lead to it are done. So if the boundary is below an inner node,
// on any path, that node is done before.
void GraphCut::collect() {
  std::vector<int32_t> boundary_below(nodes_.size(), kNone);
  for (const int32_t index : bottom_up_) {
    if (input_side_[index] == 0) continue;
    if (leads_to_weight_side(index)) {
      boundary_below[index] = static_cast<int32_t>(boundary_.size());
      boundary_.push_back(nodes_[index]);
      continue;
    }
    for (const int32_t child : children(index)) {
      if (child != kNone)
        boundary_below[index] = std::max(boundary_below[index], boundary_below[child]);
    }
    inner_.push_back(nodes_[index]);
    done_before_.push_back(boundary_below[index]);
  }
}

// Asks for names, which is slow, of custom nodes only.
void GraphCut::look_for_obstacles() {
  if (boundary_.empty()) return;
  for (Node* node : inner_) {
    if (!is_custom(node)) continue;
    const std::string name = node->name();
    if (name == "CompiledFunctionBackward") {
      why_not_ =
          "a compiled part frees its buffers in its first backward (donated buffers), but the "
          "layers around it need a second one for their weights; compile the whole stage";
    }
  }
}

}  // namespace pydist
