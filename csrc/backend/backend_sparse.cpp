// Sums of sparse tensors: everybody gets everybody's elements, and adds them up.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>

#include "backend/backend.h"
#include "base/check.h"
#include "base/python_boundary.h"

namespace pydist {

namespace {

// Of a call that ranks must agree about: the elements of one rank, and what is equal on all.
std::vector<int64_t> description_of(const at::Tensor& tensor) {
  std::vector<int64_t> words = {tensor._nnz(), static_cast<int64_t>(tensor.scalar_type()),
                                tensor.sparse_dim()};
  for (const int64_t size : tensor.sizes()) words.push_back(size);
  return words;
}

at::Tensor row_of_words(const std::vector<int64_t>& words) {
  const auto length = static_cast<int64_t>(words.size());
  const at::Tensor row = at::empty({length}, at::kLong);
  std::copy(words.begin(), words.end(), row.data_ptr<int64_t>());
  return row;
}

}  // namespace

// The numbers of elements are exchanged at once, in async calls too: what follows has sizes by
// them.
std::vector<int64_t> Backend::exchange_counts(const at::Tensor& tensor) {
  const at::Tensor mine = row_of_words(description_of(tensor));
  const at::Tensor all = at::empty({getSize(), mine.numel()}, at::kLong);
  communicator_->all_gather(buffer_of(mine, Arithmetic::kNone), buffer_of(all, Arithmetic::kNone));
  std::vector<int64_t> counts;
  for (int r = 0; r < getSize(); ++r) {
    const at::Tensor row = all.select(0, r);
    counts.push_back(row[0].item<int64_t>());
    PYDIST_CHECK(row.narrow(0, 1, row.numel() - 1).equal(mine.narrow(0, 1, mine.numel() - 1)),
                 MismatchError, "all_reduce of a sparse tensor: ", communicator_->describe(r),
                 " has one of another shape, type or number of sparse dimensions than ",
                 communicator_->describe(getRank()));
  }
  return counts;
}

Backend::WorkPointer Backend::allreduce_sparse(Tensors& tensors,
                                               const c10d::AllreduceOptions& options) {
  Plan plan(c10d::OpType::_ALLREDUCE_SPARSE, "pydist:sparse_all_reduce");
  plan.inputs = tensors;
  plan.outputs = tensors;
  std::vector<int64_t> counts;
  at::Tensor tensor;
  if (tensors.size() == 1 && options.reduceOp.op_ == c10d::ReduceOp::SUM) {
    try {
      tensor = tensors[0].detach().coalesce();
      counts = exchange_counts(tensor);
    } catch (...) {
      rethrow_through_torch(std::current_exception());
    }
  }
  return launch(std::move(plan), {options.timeout, is_async(options)}, [&](Plan& plan) {
    PYDIST_CHECK(tensor.defined(), UsageError,
                 "a sparse tensor can only be summed, one in each call");
    Tensors indices, values;
    for (const int64_t count : counts) {
      indices.push_back(at::empty({tensor.sparse_dim(), count}, at::kLong));
      auto sizes = tensor._values().sizes().vec();
      sizes[0] = count;
      values.push_back(at::empty(sizes, tensor._values().options()));
    }
    add_all_gather(plan, indices, tensor._indices());
    add_all_gather(plan, values, tensor._values());
    plan.outputs = tensors;
    plan.do_later([target = tensors[0], indices, values] {
      const at::Tensor all = at::sparse_coo_tensor(at::cat(indices, 1), at::cat(values, 0),
                                                   target.sizes(), target.options());
      target.copy_(all.coalesce());
    });
  });
}

}  // namespace pydist
