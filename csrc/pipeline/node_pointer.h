// torch's pointer to a node of its graph: shared in torch 2.9, intrusive later.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace pydist {

using NodePtr = decltype(torch::autograd::Edge::function);

// The pointer's type is a parameter so that only the branch for this torch is compiled.
template <typename Made, typename Pointer = NodePtr, typename... Args>
Pointer make_node(Args&&... args) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<Made>(std::forward<Args>(args)...);
  } else {
    return c10::make_intrusive<Made>(std::forward<Args>(args)...);
  }
}

}  // namespace pydist
