#include "bucket/sliced_mean.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "base/cpu.h"
#include "collective/reduce.h"

namespace pydist {

namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

// torch 2.13 gave both calls new names; the second of each pair is found where the first is not.
template <class Group>
auto all_to_all(Group& group, at::Tensor& to, at::Tensor& from, std::vector<int64_t>& equal, int)
    -> decltype(group.all_to_all_single(to, from, equal, equal)) {
  return group.all_to_all_single(to, from, equal, equal);
}
template <class Group>
Work all_to_all(Group& group, at::Tensor& to, at::Tensor& from, std::vector<int64_t>& equal, long) {
  return group.alltoall_base(to, from, equal, equal);
}

template <class Group>
auto all_gather(Group& group, at::Tensor& to, at::Tensor& from, int)
    -> decltype(group.all_gather_single(to, from)) {
  return group.all_gather_single(to, from);
}
template <class Group>
Work all_gather(Group& group, at::Tensor& to, at::Tensor& from, long) {
  return group._allgather_base(to, from);
}

}  // namespace

SlicedMean::SlicedMean(c10::intrusive_ptr<c10d::ProcessGroup> group, DType dtype,
                       int64_t num_elements)
    : group_(std::move(group)),
      dtype_(dtype),
      slice_elements_((num_elements + group_->getSize() - 1) / group_->getSize()) {
  const auto nbytes = static_cast<int64_t>(dtype_nbytes(dtype)) * slice_elements_;
  elements_ = at::zeros({group_->getSize() * nbytes}, at::TensorOptions(at::kByte));
  received_ = at::empty_like(elements_);
}

Work SlicedMean::exchange() {
  std::vector<int64_t> equal;
  return all_to_all(*group_, received_, elements_, equal, 0);
}

Work SlicedMean::gather(int divisor) {
  static const Isa isa = detect_isa();  // any gives the same bits
  const int size = group_->getSize();
  std::vector<at::Tensor> slices = received_.chunk(size);
  std::vector<const void*> inputs;
  for (const at::Tensor& slice : slices) inputs.push_back(slice.data_ptr());
  at::Tensor& mine = slices[group_->getRank()];
  void* output = mine.data_ptr();
  reduce(dtype_, ReduceOp::kMean, {inputs.data(), size, &output, 1, slice_elements_, divisor}, isa);
  return all_gather(*group_, elements_, mine, 0);
}

}  // namespace pydist
