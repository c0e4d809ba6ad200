// Where the graph of one stage's forward is cut, so that backward can run in two parts.
//
//   outputs              ---> edges of autograd's graph, from a node to what gave its arguments
//      |
//      v
//   boundary ---> weights     input side:  nodes that lead to a received input
//      |                      weight side: all the others
//      v                      boundary:    nodes of the input side with an edge to the other
//   boundary ---> weights
//      |
//      v
//   received inputs
//
// An edge within the input side is I's, one that ends in the weight side is W's; no edge leads from
// the weight side back to the input side. So I runs the input side without the edges that leave it,
// and W runs the boundary again with only those, and then the weight side. Each edge is evaluated
// once, as in a whole backward, with the same operands.
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

#include "pipeline/node_pointer.h"

namespace pydist {

class GraphCut {
 public:
  // `inputs`: the edges of the received inputs. The nodes live as long as the roots do.
  GraphCut(const torch::autograd::edge_list& roots, const torch::autograd::edge_list& inputs);

  bool is_input_side(const torch::autograd::Node* node) const;
  // Nodes of the input side, those on the boundary and the others, each after what it leads to.
  const std::vector<torch::autograd::Node*>& boundary() const { return boundary_; }
  const std::vector<torch::autograd::Node*>& inner() const { return inner_; }
  // By inner node: a place in the boundary that is run only after this node is done, or kNone.
  const std::vector<int32_t>& done_before() const { return done_before_; }
  // Below opaque nodes.
  const std::vector<NodePtr>& leaves_of_input_side() const { return leaves_of_input_side_; }
  // Why the two parts cannot run; empty if they can.
  const std::string& why_not() const { return why_not_; }

  static constexpr int32_t kNone = -1;

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
  std::vector<int32_t> done_before_;
  std::vector<NodePtr> leaves_of_input_side_;
  std::string why_not_;
};

}  // namespace pydist
