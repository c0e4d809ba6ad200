// What differs between the versions of torch that the backend is built for, 2.9 to 2.14.
#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <type_traits>

namespace pydist {

// Options of older versions do not all say whether the caller waits: then it does not.
template <class Options, class = void>
struct HasAsyncOp : std::false_type {};
template <class Options>
struct HasAsyncOp<Options, std::void_t<decltype(std::declval<Options>().asyncOp)>>
    : std::true_type {};

template <class Options>
bool is_async(const Options& options) {
  if constexpr (HasAsyncOp<Options>::value) {
    return options.asyncOp;
  } else {
    return true;
  }
}

}  // namespace pydist
