// The mean of a half-typed unit over a process group, in the bits that shared memory gives.
//
//   exchange  all-to-all: every rank sends slice s of its elements to rank s
//   gather    rank s adds the slices in rank order in float32, scales, rounds once; all-gather
//
// No rank but the owner adds, so a half type crosses the network as it is, and is rounded once.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "collective/dtype.h"

namespace pydist {

class SlicedMean {
 public:
  SlicedMean(c10::intrusive_ptr<c10d::ProcessGroup> group, DType dtype, int64_t num_elements);

  // The unit's elements, and behind them zeros that make all slices equally long.
  void* memory() const { return elements_.data_ptr(); }
  c10::intrusive_ptr<c10d::Work> exchange();
  // After the exchange. The sum divided by `divisor` is in memory() when the work is done.
  c10::intrusive_ptr<c10d::Work> gather(int divisor);

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  DType dtype_;
  int64_t slice_elements_;
  at::Tensor elements_;  // bytes, which every process group can send
  at::Tensor received_;
};

}  // namespace pydist
