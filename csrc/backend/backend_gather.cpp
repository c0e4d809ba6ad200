#include "backend/backend.h"
#include "base/check.h"

namespace pydist {

namespace {

// What a collective that takes lists of lists gets from a rank that has one tensor.
const std::vector<at::Tensor>& only_list(const std::vector<std::vector<at::Tensor>>& lists,
                                         const char* what) {
  PYDIST_CHECK(lists.size() == 1, UsageError, "requires a single-element ", what, " list, found ",
               lists.size(), " elements");
  return lists[0];
}

bool equal_sizes(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() != tensors[0].numel()) return false;
  }
  return true;
}

void check_sizes(const std::vector<at::Tensor>& tensors, const at::Tensor& like) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    PYDIST_CHECK(tensors[i].numel() == like.numel(), UsageError, "invalid tensor size at index ", i,
                 " (expected ", like.sizes(), ", got ", tensors[i].sizes(), ")");
  }
}

void check_types(const std::vector<at::Tensor>& tensors, const at::Tensor& like) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    PYDIST_CHECK(tensors[i].scalar_type() == like.scalar_type(), UsageError,
                 "invalid tensor type at index ", i, " (expected ", like.scalar_type(), ", got ",
                 tensors[i].scalar_type(), ")");
  }
}

// In elements of the buffer, which are bytes where the engine does not know the tensors' type.
std::vector<int64_t> splits_of(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> splits;
  for (const at::Tensor& tensor : tensors) {
    splits.push_back(buffer_of(tensor, Arithmetic::kNone).num_elements);
  }
  return splits;
}

// Rows of the first dimension, in elements of the buffer; equal parts where none are given.
std::vector<int64_t> splits_of_rows(const at::Tensor& tensor, const std::vector<int64_t>& rows,
                                    int64_t num_elements, int size) {
  if (rows.empty()) {
    PYDIST_CHECK(tensor.dim() > 0 && tensor.size(0) % size == 0, UsageError,
                 "Tensor's dim 0 does not divide equally across group size: ", tensor.sizes(),
                 " for ", size, " ranks");
    return std::vector<int64_t>(size, num_elements / size);
  }
  PYDIST_CHECK(rows.size() == static_cast<size_t>(size), UsageError,
               "Number of tensor splits not equal to group size: ", rows.size(), " splits for ",
               size, " ranks");
  int64_t sum = 0;
  for (const int64_t count : rows) sum += count;
  PYDIST_CHECK(tensor.dim() > 0 && sum == tensor.size(0), UsageError,
               "Split sizes doesn't match total dim 0 size: ", sum, " for ", tensor.sizes());
  std::vector<int64_t> splits;
  const int64_t row = sum > 0 ? num_elements / sum : 0;
  for (const int64_t count : rows) splits.push_back(count * row);
  return splits;
}

void add_gather_into(Plan& plan, const at::Tensor& output, const at::Tensor& input, int size) {
  PYDIST_CHECK(output.scalar_type() == input.scalar_type(), UsageError,
               "output tensor must have the same type as input tensor: ", output.scalar_type(),
               " and ", input.scalar_type());
  PYDIST_CHECK(output.numel() == input.numel() * size, UsageError,
               "output tensor size must be equal to world_size times input tensor size: ",
               output.numel(), " and ", input.numel(), " elements, ", size, " ranks");
  const Buffer from = plan.read(input);
  const Buffer to = plan.write_whole(output);
  plan.steps.push_back({Operation::kAllGather, ReduceOp::kSum, 0, from, to});
  plan.outputs.push_back(output);
}

}  // namespace

void Backend::add_all_gather(Plan& plan, const Tensors& outputs, const at::Tensor& input) {
  check_types(outputs, input);
  plan.outputs.insert(plan.outputs.end(), outputs.begin(), outputs.end());
  if (equal_sizes(outputs)) {
    check_sizes(outputs, input);
    const Buffer from = plan.read(input);
    plan.steps.push_back({Operation::kAllGather, ReduceOp::kSum, 0, from, plan.write_all(outputs)});
    return;
  }
  // Everybody sends everybody its whole input.
  const std::vector<at::Tensor> copies(outputs.size(), input);
  Collective step{Operation::kAllToAll, ReduceOp::kSum, 0, plan.read_all(copies),
                  plan.write_all(outputs)};
  step.input_splits = splits_of(copies);
  step.output_splits = splits_of(outputs);
  plan.steps.push_back(std::move(step));
}

Backend::WorkPointer Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  Plan plan(c10d::OpType::BROADCAST, "pydist:broadcast");
  plan.inputs = tensors;
  return launch(std::move(plan), {options.timeout, is_async(options)}, [&](Plan& plan) {
    check_root(options.rootRank);
    const int root = static_cast<int>(options.rootRank);
    const Buffer buffer = plan.write(only(tensors));
    plan.steps.push_back({Operation::kBroadcast, ReduceOp::kSum, root, {}, buffer});
    plan.outputs = tensors;
  });
}

Backend::WorkPointer Backend::allgather(TensorLists& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) {
  Plan plan(c10d::OpType::ALLGATHER, "pydist:all_gather");
  plan.inputs = inputs;
  return launch(std::move(plan), {options.timeout, is_async(options)}, [&](Plan& plan) {
    const at::Tensor& input = only(inputs);
    const Tensors& list = only_list(outputs, "output");
    check_length(list.size(), "output");
    add_all_gather(plan, list, input);
  });
}

Backend::WorkPointer Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::AllgatherOptions& options) {
  Plan plan(c10d::OpType::_ALLGATHER_BASE, "pydist:_all_gather_base");
  plan.inputs = {input};
  return launch(std::move(plan), {options.timeout, is_async(options)},
                [&](Plan& plan) { add_gather_into(plan, output, input, getSize()); });
}

// outputs[r][i] is rank r's inputs[i].
Backend::WorkPointer Backend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                  const c10d::AllgatherOptions& options) {
  Plan plan(c10d::OpType::ALLGATHER_COALESCED, "pydist:all_gather_coalesced");
  plan.inputs = inputs;
  return launch(std::move(plan), {options.timeout, is_async(options)}, [&](Plan& plan) {
    PYDIST_CHECK(!inputs.empty(), UsageError, "requires non-empty input tensor list");
    check_length(outputs.size(), "output");
    for (const Tensors& list : outputs) {
      PYDIST_CHECK(list.size() == inputs.size(), UsageError,
                   "invalid output size: (expected length ", inputs.size(), ", got ", list.size(),
                   ")");
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors of_ranks;
      for (const Tensors& list : outputs) of_ranks.push_back(list[i]);
      add_all_gather(plan, of_ranks, inputs[i]);
    }
  });
}

Backend::WorkPointer Backend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  Plan plan(c10d::OpType::COALESCED, "pydist:all_gather_into_tensor_coalesced");
  plan.inputs = inputs;
  return launch(std::move(plan), {options.timeout, is_async(options)}, [&](Plan& plan) {
    PYDIST_CHECK(outputs.size() == inputs.size(), UsageError,
                 "requires input/output tensor lists to have the same length, found ",
                 inputs.size(), " and ", outputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      add_gather_into(plan, outputs[i], inputs[i], getSize());
    }
  });
}

Backend::WorkPointer Backend::gather(TensorLists& outputs, Tensors& inputs,
                                     const c10d::GatherOptions& options) {
  Plan plan(c10d::OpType::GATHER, "pydist:gather");
  plan.inputs = inputs;
  return launch(std::move(plan), {options.timeout, is_async(options)}, [&](Plan& plan) {
    check_root(options.rootRank);
    const int root = static_cast<int>(options.rootRank);
    const at::Tensor& input = only(inputs);
    Collective step{Operation::kGather, ReduceOp::kSum, root, plan.read(input), {}};
    if (root == getRank()) {
      const Tensors& list = only_list(outputs, "output");
      check_length(list.size(), "output");
      check_types(list, input);
      check_sizes(list, input);
      step.output = plan.write_all(list);
      plan.outputs = list;
    } else {
      PYDIST_CHECK(outputs.empty() || (outputs.size() == 1 && outputs[0].empty()), UsageError,
                   "requires empty output on non-root");
    }
    plan.steps.push_back(std::move(step));
  });
}

Backend::WorkPointer Backend::scatter(Tensors& outputs, TensorLists& inputs,
                                      const c10d::ScatterOptions& options) {
  Plan plan(c10d::OpType::SCATTER, "pydist:scatter");
  if (!inputs.empty()) plan.inputs = inputs[0];
  return launch(std::move(plan), {options.timeout, is_async(options)}, [&](Plan& plan) {
    check_root(options.rootRank);
    const int root = static_cast<int>(options.rootRank);
    const at::Tensor& output = only(outputs);
    Collective step{Operation::kScatter, ReduceOp::kSum, root, {}, plan.write_whole(output)};
    if (root == getRank()) {
      const Tensors& list = only_list(inputs, "input");
      check_length(list.size(), "input");
      check_types(list, output);
      check_sizes(list, output);
      step.input = plan.read_all(list);
    } else {
      PYDIST_CHECK(inputs.empty() || (inputs.size() == 1 && inputs[0].empty()), UsageError,
                   "requires empty input on non-root");
    }
    plan.outputs = outputs;
    plan.steps.push_back(std::move(step));
  });
}

Backend::WorkPointer Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllToAllOptions& options) {
  Plan plan(c10d::OpType::ALLTOALL, "pydist:all_to_all");
  plan.inputs = inputs;
  return launch(std::move(plan), {options.timeout, is_async(options)}, [&](Plan& plan) {
    check_length(inputs.size(), "input");
    check_length(outputs.size(), "output");
    check_types(outputs, inputs[0]);
    Collective step{Operation::kAllToAll, ReduceOp::kSum, 0, plan.read_all(inputs),
                    plan.write_all(outputs)};
    step.input_splits = splits_of(inputs);
    step.output_splits = splits_of(outputs);
    plan.outputs = outputs;
    plan.steps.push_back(std::move(step));
  });
}

Backend::WorkPointer Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                            std::vector<int64_t>& output_splits,
                                            std::vector<int64_t>& input_splits,
                                            const c10d::AllToAllOptions& options) {
  Plan plan(c10d::OpType::ALLTOALL_BASE, "pydist:all_to_all");
  plan.inputs = {input};
  return launch(std::move(plan), {options.timeout, is_async(options)}, [&](Plan& plan) {
    PYDIST_CHECK(output.scalar_type() == input.scalar_type(), UsageError,
                 "Tensors are not equal in data type: ", output.scalar_type(), " and ",
                 input.scalar_type());
    Collective step{Operation::kAllToAll, ReduceOp::kSum, 0, plan.read(input),
                    plan.write_whole(output)};
    step.input_splits = splits_of_rows(input, input_splits, step.input.num_elements, getSize());
    step.output_splits = splits_of_rows(output, output_splits, step.output.num_elements, getSize());
    plan.outputs = {output};
    plan.steps.push_back(std::move(step));
  });
}

}  // namespace pydist
