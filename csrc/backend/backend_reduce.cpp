#include "backend/backend.h"
#include "base/check.h"

namespace pydist {

namespace {

ReduceOp op_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kMean;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      return ReduceOp::kBitAnd;
    case c10d::ReduceOp::BOR:
      return ReduceOp::kBitOr;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::kBitXor;
    default:
      throw UsageError(
          "cannot reduce with ReduceOp.PREMUL_SUM; scale the tensor before a SUM instead");
  }
}

void add_all_reduce(Plan& plan, const at::Tensor& tensor, ReduceOp op) {
  const Buffer buffer = plan.write(tensor, Arithmetic::kNeeded);
  plan.steps.push_back({Operation::kAllReduce, op, 0, {}, buffer});
  plan.outputs.push_back(tensor);
}

void add_reduce_scatter(Plan& plan, const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                        int size) {
  PYDIST_CHECK(output.scalar_type() == input.scalar_type(), UsageError,
               "output tensor must have the same type as input tensor: ", output.scalar_type(),
               " and ", input.scalar_type());
  PYDIST_CHECK(input.numel() == output.numel() * size, UsageError,
               "input tensor must be the same size as output size times world size: ",
               input.numel(), " and ", output.numel(), " elements, ", size, " ranks");
  const Buffer from = plan.read(input, Arithmetic::kNeeded);
  const Buffer to = plan.write_whole(output);
  plan.steps.push_back({Operation::kReduceScatter, op, 0, from, to});
  plan.outputs.push_back(output);
}

// Rank r's output is the reduction of everybody's inputs[r], whose sizes may differ by r.
void add_reduce_scatter(Plan& plan, const at::Tensor& output, const std::vector<at::Tensor>& inputs,
                        ReduceOp op, int rank) {
  const at::Tensor& mine = inputs[rank];
  PYDIST_CHECK(output.scalar_type() == mine.scalar_type() && output.numel() == mine.numel(),
               UsageError, "invalid output: expected ", mine.numel(), " elements of ",
               mine.scalar_type(), ", found ", output.numel(), " of ", output.scalar_type());
  plan.outputs.push_back(output);
  bool equal = true;
  for (const at::Tensor& input : inputs) equal &= input.numel() == mine.numel();
  if (equal) {
    const Buffer from = plan.read_all(inputs, Arithmetic::kNeeded);
    plan.steps.push_back({Operation::kReduceScatter, op, 0, from, plan.write_whole(output)});
    return;
  }
  const at::Tensor together = plan.copy_of_all(inputs);
  plan.steps.push_back(
      {Operation::kAllReduce, op, 0, {}, plan.write(together, Arithmetic::kNeeded)});
  int64_t offset = 0;
  for (int r = 0; r < rank; ++r) offset += inputs[r].numel();
  plan.copy_later(output, together.narrow(0, offset, output.numel()));
}

}  // namespace

Backend::WorkPointer Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, options);
  Plan plan(c10d::OpType::ALLREDUCE, "pydist:all_reduce");
  plan.inputs = tensors;
  return launch(std::move(plan), {options.timeout, is_async(options)},
                [&](Plan& plan) { add_all_reduce(plan, only(tensors), op_of(options.reduceOp)); });
}

Backend::WorkPointer Backend::allreduce_coalesced(Tensors& tensors,
                                                  const c10d::AllreduceCoalescedOptions& options) {
  Plan plan(c10d::OpType::ALLREDUCE_COALESCED, "pydist:all_reduce");
  plan.inputs = tensors;
  return launch(std::move(plan), {options.timeout, is_async(options)}, [&](Plan& plan) {
    PYDIST_CHECK(!tensors.empty(), UsageError, "requires non-empty tensor list");
    const ReduceOp op = op_of(options.reduceOp);
    for (const at::Tensor& tensor : tensors) add_all_reduce(plan, tensor, op);
  });
}

Backend::WorkPointer Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  Plan plan(c10d::OpType::REDUCE, "pydist:reduce");
  plan.inputs = tensors;
  return launch(std::move(plan), {options.timeout, is_async(options)}, [&](Plan& plan) {
    check_root(options.rootRank);
    const int root = static_cast<int>(options.rootRank);
    const Buffer buffer = plan.write(only(tensors), Arithmetic::kNeeded);
    plan.steps.push_back({Operation::kReduce, op_of(options.reduceOp), root, {}, buffer});
    plan.outputs = tensors;
  });
}

Backend::WorkPointer Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                             const c10d::ReduceScatterOptions& options) {
  Plan plan(c10d::OpType::REDUCE_SCATTER, "pydist:reduce_scatter");
  if (!inputs.empty()) plan.inputs = inputs[0];
  return launch(std::move(plan), {options.timeout, is_async(options)}, [&](Plan& plan) {
    const at::Tensor& output = only(outputs);
    PYDIST_CHECK(inputs.size() == 1, UsageError, "requires a single-element input list");
    check_length(inputs[0].size(), "input");
    add_reduce_scatter(plan, output, inputs[0], op_of(options.reduceOp), getRank());
  });
}

Backend::WorkPointer Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& options) {
  Plan plan(c10d::OpType::_REDUCE_SCATTER_BASE, "pydist:_reduce_scatter_base");
  plan.inputs = {input};
  return launch(std::move(plan), {options.timeout, is_async(options)}, [&](Plan& plan) {
    add_reduce_scatter(plan, output, input, op_of(options.reduceOp), getSize());
  });
}

Backend::WorkPointer Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  Plan plan(c10d::OpType::COALESCED, "pydist:reduce_scatter_coalesced");
  plan.inputs = inputs;
  return launch(std::move(plan), {options.timeout, is_async(options)}, [&](Plan& plan) {
    PYDIST_CHECK(outputs.size() == inputs.size(), UsageError,
                 "requires input/output tensor lists to have the same length, found ",
                 inputs.size(), " and ", outputs.size());
    const ReduceOp op = op_of(options.reduceOp);
    for (size_t i = 0; i < inputs.size(); ++i) {
      add_reduce_scatter(plan, outputs[i], inputs[i], op, getSize());
    }
  });
}

}  // namespace pydist
