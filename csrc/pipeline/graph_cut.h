// Where the graph of one stage's forward is cut, so that backward can run in two parts.
//
//   outputs          ---> edges of autograd's graph, from a node to those that gave its arguments
//      |
//      v
//   boundary ---> weights        input side: nodes that lead to a received input
//      |                         weight side: all the others
//      v                         boundary: nodes of the input side with an edge into the weight
//      side
//   boundary ---> weights
//      |
//      v
//   received inputs
//
// An edge within the input side is I's, one that ends in the weight side is W's; no edge leads from
// the weight side back to the input side. So I runs the input side for its own edges alone, W runs
// the boundary again with the gradients that arrived there for the other edges, and then the weight
// side. Each edge is evaluated once, as in a whole backward, with the same operands.
//
// A node that must not run twice is *opaque*: Python's and C++'s custom functions, whose backward
// computes everything at once; CopySlices; whatever has post-hooks. If one is on the boundary,
// everything below it changes to the input side, so that I accumulates the weights down there.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <string>
#include <vector>

namespace pydist {

// Nodes are alive as long as the roots are.
class GraphCut {
 public:
  // `targets`: the edges of the received inputs. Roots may repeat.
  GraphCut(const torch::autograd::edge_list& roots, const torch::autograd::edge_list& targets);

  bool is_input_side(const torch::autograd::Node* node) const;
  // Nodes of the input side, each after those that it leads to.
  const std::vector<torch::autograd::Node*>& boundary() const { return boundary_; }
  const std::vector<torch::autograd::Node*>& inner() const { return inner_; }  // not boundary
  // What I has to reach: those of the targets that the roots lead to, and leaves below opaque
  // nodes.
  const torch::autograd::edge_list& targets() const { return targets_; }
  const std::vector<torch::autograd::Node*>& opaque_leaves() const { return opaque_leaves_; }
  // Why the two parts cannot run; empty if they can.
  const std::string& why_not() const { return why_not_; }

 private:
  struct Children {
    const int32_t* first;
    const int32_t* last;
    const int32_t* begin() const { return first; }
    const int32_t* end() const { return last; }
  };

  Children children(int index) const;  // kNone where an edge leads nowhere
  void walk(const torch::autograd::edge_list& roots);
  int find(const torch::autograd::Node* node) const;
  int find_or_add(torch::autograd::Node* node);
  void grow_table();
  void spread_input_side();
  bool move_below_opaque();
  void move_below(int top);
  bool leads_to_weight_side(int index) const;
  void collect();
  void look_for_obstacles();

  // Flat, since this runs once a microbatch: `children_` has the edges of all nodes, those of node
  // i from first_child_[i] on, as indices of nodes (or kNone).
  std::vector<torch::autograd::Node*> nodes_;
  std::vector<uint32_t> first_child_;
  std::vector<int32_t> children_;
  std::vector<int32_t> bottom_up_;  // each node after its children
  std::vector<uint8_t> input_side_;
  std::vector<int32_t> table_;  // open addressing by the node's address

  std::vector<torch::autograd::Node*> boundary_;
  std::vector<torch::autograd::Node*> inner_;
  torch::autograd::edge_list targets_;
  std::vector<torch::autograd::Node*> opaque_leaves_;
  std::string why_not_;
};

}  // namespace pydist
