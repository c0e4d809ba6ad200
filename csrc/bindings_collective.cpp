// The communicator as Python sees it: tensors in, errors out, no GIL held while anybody waits.
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend/tensor_buffer.h"
#include "backend/torch_dtype.h"
#include "base/check.h"
#include "base/clock.h"
#include "bindings.h"
#include "bindings_communicator.h"
#include "collective/hosts_communicator.h"
#include "collective/shm_communicator.h"
#include "transport/c10d_store.h"

namespace py = pybind11;

namespace pydist {

namespace {

// Any tensor that fills a run of memory without gaps, in whatever order.
Buffer dense_buffer(const at::Tensor& tensor) {
  PYDIST_CHECK(tensor.is_non_overlapping_and_dense(), UsageError,
               "expected tensors that fill their memory without gaps");
  Buffer buffer = buffer_of(tensor, Arithmetic::kNone);
  if (tensor.is_contiguous()) return buffer;
  buffer.order = 1;
  for (const int64_t stride : tensor.strides()) {
    buffer.order = buffer.order * 1099511628211u + static_cast<uint64_t>(stride);
  }
  return buffer;
}

ReduceOp op_of(int index) {
  PYDIST_CHECK(index >= 0 && index < kNumReduceOps, UsageError, "no reduce operation ", index);
  return static_cast<ReduceOp>(index);
}

using MaybeRequest = std::optional<PyRequest>;

Collective invalid(std::string why) {
  Collective collective{Operation::kInvalid, ReduceOp::kSum, 0, {}, {}};
  collective.why = std::move(why);
  return collective;
}

// Runs the operation that `build` describes, or starts it and keeps its tensors. What `build`
// raises the peers learn too: they are about to wait for this call.
template <class Build>
MaybeRequest launch(const SharedCommunicator& communicator, bool async_op,
                    std::initializer_list<at::Tensor> tensors, Build&& build) {
  Collective collective;
  try {
    collective = build();
  } catch (const UsageError& error) {
    collective = invalid(error.what());
  }
  if (!async_op) {
    const py::gil_scoped_release no_gil;
    communicator->run(collective);
    return std::nullopt;
  }
  auto keep_alive = std::make_shared<std::vector<at::Tensor>>(tensors);
  const py::gil_scoped_release no_gil;
  return PyRequest(communicator, communicator->start(std::move(collective), std::move(keep_alive)));
}

SharedCommunicator make_communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                     double timeout_s, std::string name,
                                     std::vector<int> global_ranks) {
  BoardOptions options;
  options.rank = rank;
  options.size = size;
  options.timeout_s = timeout_s;
  options.name = std::move(name);
  options.global_ranks = std::move(global_ranks);
  const py::gil_scoped_release no_gil;
  const std::unique_ptr<Store> meeting = wrap_c10d_store(std::move(store));
  return without_gil_at_end(ShmCommunicator::create(*meeting, std::move(options)));
}

MaybeRequest all_reduce(const SharedCommunicator& communicator, const at::Tensor& tensor, int op,
                        bool async_op) {
  return launch(communicator, async_op, {tensor}, [&] {
    const Buffer buffer = contiguous_buffer(tensor, Arithmetic::kNeeded);
    return Collective{Operation::kAllReduce, op_of(op), 0, {}, buffer};
  });
}

MaybeRequest reduce_scatter(const SharedCommunicator& communicator, const at::Tensor& output,
                            const at::Tensor& input, int op, bool async_op) {
  return launch(communicator, async_op, {input, output}, [&] {
    const Buffer from = contiguous_buffer(input, Arithmetic::kNeeded);
    const Buffer to = contiguous_buffer(output, Arithmetic::kNeeded);
    return Collective{Operation::kReduceScatter, op_of(op), 0, from, to};
  });
}

// Of the ranks' tensors only the root's is written.
MaybeRequest reduce_at_root(const SharedCommunicator& communicator, const at::Tensor& tensor,
                            int root, int op, bool async_op) {
  return launch(communicator, async_op, {tensor}, [&] {
    const Buffer buffer = contiguous_buffer(tensor, Arithmetic::kNeeded);
    return Collective{Operation::kReduce, op_of(op), root, {}, buffer};
  });
}

MaybeRequest gather(const SharedCommunicator& communicator, const std::optional<at::Tensor>& output,
                    const at::Tensor& input, int root, bool async_op) {
  return launch(communicator, async_op, {input, output.value_or(at::Tensor())}, [&] {
    Collective collective{
        Operation::kGather, ReduceOp::kSum, root, contiguous_buffer(input, Arithmetic::kNone), {}};
    if (output) collective.output = contiguous_buffer(*output, Arithmetic::kNone);
    return collective;
  });
}

MaybeRequest scatter(const SharedCommunicator& communicator, const at::Tensor& output,
                     const std::optional<at::Tensor>& input, int root, bool async_op) {
  return launch(communicator, async_op, {output, input.value_or(at::Tensor())}, [&] {
    Collective collective{Operation::kScatter,
                          ReduceOp::kSum,
                          root,
                          {},
                          contiguous_buffer(output, Arithmetic::kNone)};
    if (input) collective.input = contiguous_buffer(*input, Arithmetic::kNone);
    return collective;
  });
}

MaybeRequest all_gather(const SharedCommunicator& communicator, const at::Tensor& output,
                        const at::Tensor& input, bool async_op) {
  return launch(communicator, async_op, {input, output}, [&] {
    const Buffer from = contiguous_buffer(input, Arithmetic::kNone);
    const Buffer to = contiguous_buffer(output, Arithmetic::kNone);
    return Collective{Operation::kAllGather, ReduceOp::kSum, 0, from, to};
  });
}

MaybeRequest broadcast(const SharedCommunicator& communicator, const at::Tensor& tensor, int root,
                       bool async_op) {
  return launch(communicator, async_op, {tensor}, [&] {
    const Buffer buffer = contiguous_buffer(tensor, Arithmetic::kNone);
    return Collective{Operation::kBroadcast, ReduceOp::kSum, root, {}, buffer};
  });
}

void broadcast_many(const SharedCommunicator& communicator, const std::vector<at::Tensor>& tensors,
                    int root) {
  launch(communicator, false, {}, [&] {
    Collective collective{Operation::kBroadcastMany, ReduceOp::kSum, root, {}, {}};
    for (const at::Tensor& tensor : tensors) collective.buffers.push_back(dense_buffer(tensor));
    return collective;
  });
}

MaybeRequest barrier(const SharedCommunicator& communicator, bool async_op) {
  return launch(communicator, async_op, {}, [] { return Collective{}; });
}

// Splits count elements.
MaybeRequest all_to_all(const SharedCommunicator& communicator, const at::Tensor& output,
                        const at::Tensor& input, const std::vector<int64_t>& output_splits,
                        const std::vector<int64_t>& input_splits, bool async_op) {
  return launch(communicator, async_op, {input, output}, [&] {
    Collective collective{Operation::kAllToAll, ReduceOp::kSum, 0,
                          contiguous_buffer(input, Arithmetic::kNone),
                          contiguous_buffer(output, Arithmetic::kNone)};
    collective.input_splits = input_splits;
    collective.output_splits = output_splits;
    if (dtype_of(input.scalar_type())) return collective;
    for (auto* splits : {&collective.input_splits, &collective.output_splits}) {
      for (int64_t& split : *splits) split *= static_cast<int64_t>(input.itemsize());
    }
    return collective;
  });
}

// Raises UsageError here and MismatchError on the peers, for a call that cannot be made.
void refuse(const SharedCommunicator& communicator, const std::string& why) {
  const py::gil_scoped_release no_gil;
  communicator->run(invalid(why));
}

// Seconds for `iterations` in-place sums in a row, without Python's share.
double benchmark_all_reduce(const SharedCommunicator& communicator, const at::Tensor& tensor,
                            int iterations) {
  const Buffer buffer = contiguous_buffer(tensor, Arithmetic::kNeeded);
  const py::gil_scoped_release no_gil;
  const double start_s = monotonic_s();
  for (int i = 0; i < iterations; ++i) communicator->all_reduce(buffer, ReduceOp::kSum);
  return monotonic_s() - start_s;
}

const char* transport_of(const Communicator& communicator) {
  return dynamic_cast<const HostsCommunicator*>(&communicator) != nullptr ? "hosts"
                                                                          : "shared_memory";
}

}  // namespace

std::shared_ptr<Communicator> without_gil_at_end(std::shared_ptr<Communicator> communicator) {
  Communicator* pointer = communicator.get();
  return std::shared_ptr<Communicator>(pointer,
                                       [owner = std::move(communicator)](Communicator*) mutable {
                                         std::optional<py::gil_scoped_release> no_gil;
                                         if (PyGILState_Check()) no_gil.emplace();
                                         owner.reset();
                                       });
}

void bind_collective(py::module_& module) {
  py::class_<PyRequest>(module, "Request", "An operation that was started with async_op.")
      .def("test", &PyRequest::test, "True once the operation has ended, well or not.")
      .def("wait", &PyRequest::wait, py::call_guard<py::gil_scoped_release>(),
           "Returns once the operation has ended; raises what it raised.")
      .def_property_readonly("source", &PyRequest::source,
                             "Of a receive that has ended: whose message it was, else -1.")
      .def_property_readonly("description", &PyRequest::description,
                             "What it is, as error messages say it.");
  CommunicatorClass communicator(
      module, "Communicator",
      "One group's collectives and messages, on contiguous CPU tensors. "
      "Reduce operations are 0 sum, 1 mean, 2 min, 3 max, 4 product, 5, 6 and 7 bitwise and, or "
      "and xor; ranks are the group's.");
  communicator
      .def(py::init(&make_communicator), py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("timeout_s"), py::arg("name"), py::arg("global_ranks"))
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("transport", &transport_of, "As Engine.transport.")
      .def("all_reduce", &all_reduce, py::arg("tensor"), py::arg("op"), py::arg("async_op"),
           "In place.")
      .def("reduce_scatter", &reduce_scatter, py::arg("output"), py::arg("input"), py::arg("op"),
           py::arg("async_op"), "The output is this rank's part of the reduced inputs.")
      .def("reduce", &reduce_at_root, py::arg("tensor"), py::arg("root"), py::arg("op"),
           py::arg("async_op"), "The root's tensor becomes the reduction; the others' stay.")
      .def("gather", &gather, py::arg("output"), py::arg("input"), py::arg("root"),
           py::arg("async_op"),
           "The root's output is all inputs in rank order; the others have none.")
      .def("scatter", &scatter, py::arg("output"), py::arg("input"), py::arg("root"),
           py::arg("async_op"), "Rank r's output is the r-th part of the input that the root has.")
      .def("all_gather", &all_gather, py::arg("output"), py::arg("input"), py::arg("async_op"),
           "The output is all inputs in rank order.")
      .def("broadcast", &broadcast, py::arg("tensor"), py::arg("root"), py::arg("async_op"),
           "Every rank's tensor becomes the root's.")
      .def("broadcast_many", &broadcast_many, py::arg("tensors"), py::arg("root"),
           "The same for many dense tensors of any strides, equal on all ranks, in one operation.")
      .def("barrier", &barrier, py::arg("async_op"), "Ends when all ranks have called it.")
      .def("all_to_all", &all_to_all, py::arg("output"), py::arg("input"), py::arg("output_splits"),
           py::arg("input_splits"), py::arg("async_op"),
           "Sends the r-th part of input to rank r; splits count elements.")
      .def("refuse", &refuse, py::arg("why"),
           "Raises UsageError here and MismatchError on the peers, for a call that cannot be made.")
      .def(
          "fail",
          [](Communicator& communicator, const std::string& reason) { communicator.fail(reason); },
          py::arg("reason"), "Ends the group: every rank raises PeerError with this reason.")
      .def("benchmark_all_reduce", &benchmark_all_reduce, py::arg("tensor"), py::arg("iterations"),
           "Seconds for so many sums in a row, without Python's share.");
  bind_messages(communicator);
}

}  // namespace pydist
