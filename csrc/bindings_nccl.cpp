// The NCCL communicator as Python sees it: tensors of the device, no GIL held while anybody waits.
#include <ATen/ops/from_blob.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend/torch_dtype.h"
#include "base/check.h"
#include "base/device_runtime.h"
#include "bindings.h"
#include "collective/nccl_communicator.h"
#include "collective/nccl_handle.h"
#include "collective/nccl_watchdog.h"
#include "transport/c10d_store.h"
#include "transport/nccl_api.h"

namespace py = pybind11;

namespace pydist {

namespace {

constexpr double kLeave_s = 5;  // for what is going on to end when the interpreter does

using Owner = std::shared_ptr<NcclCommunicator>;
using NoGil = py::call_guard<py::gil_scoped_release>;

void without_gil(const std::function<void()>& end) {
  std::optional<py::gil_scoped_release> no_gil;
  if (Py_IsInitialized() && PyGILState_Check()) no_gil.emplace();
  end();
}

Owner make_communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size, int device,
                        double timeout_s, std::string name, std::string remedy,
                        std::vector<int> global_ranks) {
  NcclOptions options;
  options.rank = rank;
  options.size = size;
  options.device = device;
  options.timeout_s = timeout_s;
  options.name = std::move(name);
  options.remedy = std::move(remedy);
  options.global_ranks = std::move(global_ranks);
  const py::gil_scoped_release no_gil;
  auto meeting = wrap_c10d_store(own_connection(store));
  return NcclCommunicator::create(std::move(meeting), options);
}

bool is_cuda() { return std::string(device_runtime()->name()) == "cuda"; }

void require_on_device(const NcclCommunicator& communicator, const at::Tensor& tensor) {
  PYDIST_CHECK(tensor.layout() == at::kStrided, UsageError, "expected a dense tensor, found ",
               tensor.layout());
  if (!is_cuda()) return;
  PYDIST_CHECK(tensor.is_cuda() && tensor.device().index() == communicator.device(), UsageError,
               "expected a tensor on cuda:", communicator.device(), ", found one on ",
               tensor.device());
}

void* contiguous_data(const NcclCommunicator& communicator, const at::Tensor& tensor) {
  require_on_device(communicator, tensor);
  PYDIST_CHECK(tensor.is_contiguous(), UsageError, "expected a contiguous tensor");
  return tensor.mutable_data_ptr();
}

DType reducible(const at::Tensor& tensor) {
  const std::optional<DType> dtype = dtype_of(tensor.scalar_type());
  PYDIST_CHECK(dtype, UsageError, "cannot reduce tensors of ", c10::toString(tensor.scalar_type()));
  return *dtype;
}

ReduceOp op_of(int index) {
  PYDIST_CHECK(index >= 0 && index < kNumReduceOps, UsageError, "no reduce operation ", index);
  return static_cast<ReduceOp>(index);
}

void require_times(const at::Tensor& larger, const at::Tensor& smaller, int size) {
  PYDIST_CHECK(
      larger.scalar_type() == smaller.scalar_type() && larger.numel() == smaller.numel() * size,
      UsageError, "expected ", size, " times as many elements of the same type, found ",
      larger.numel(), " ", c10::toString(larger.scalar_type()), " and ", smaller.numel(), " ",
      c10::toString(smaller.scalar_type()));
}

void all_reduce(NcclCommunicator& communicator, const at::Tensor& tensor, int op,
                const std::string& what, int divisor) {
  void* data = contiguous_data(communicator, tensor);
  communicator.all_reduce(data, data, tensor.numel(), reducible(tensor), op_of(op), divisor, what);
}

void reduce_scatter(NcclCommunicator& communicator, const at::Tensor& output,
                    const at::Tensor& input, int op, const std::string& what, int divisor) {
  require_times(input, output, communicator.size());
  communicator.reduce_scatter(contiguous_data(communicator, input),
                              contiguous_data(communicator, output), output.numel(),
                              reducible(output), op_of(op), divisor, what);
}

void all_gather(NcclCommunicator& communicator, const at::Tensor& output, const at::Tensor& input,
                const std::string& what) {
  require_times(output, input, communicator.size());
  communicator.all_gather(contiguous_data(communicator, input),
                          contiguous_data(communicator, output),
                          static_cast<int64_t>(input.nbytes()), DType::kUInt8, what);
}

void all_to_all(NcclCommunicator& communicator, const at::Tensor& output, const at::Tensor& input,
                const std::string& what) {
  require_times(output, input, 1);
  PYDIST_CHECK(input.numel() % communicator.size() == 0, UsageError, "expected a multiple of ",
               communicator.size(), " elements, found ", input.numel());
  communicator.all_to_all(contiguous_data(communicator, input),
                          contiguous_data(communicator, output),
                          input.nbytes() / communicator.size(), what);
}

// Tensors that fill their memory without gaps, in whatever order.
void broadcast(NcclCommunicator& communicator, const std::vector<at::Tensor>& tensors, int root,
               const std::string& what) {
  std::vector<NcclCommunicator::Piece> pieces;
  for (const at::Tensor& tensor : tensors) {
    require_on_device(communicator, tensor);
    PYDIST_CHECK(tensor.is_non_overlapping_and_dense(), UsageError,
                 "expected tensors that fill their memory without gaps");
    pieces.push_back({tensor.mutable_data_ptr(), tensor.nbytes()});
  }
  communicator.broadcast(pieces, root, what);
}

void exchange(NcclCommunicator& communicator, const std::vector<std::pair<at::Tensor, int>>& sent,
              const std::vector<std::pair<at::Tensor, int>>& received, const std::string& what) {
  std::vector<NcclCommunicator::Transfer> transfers;
  for (const auto& [tensor, peer] : sent) {
    transfers.push_back({contiguous_data(communicator, tensor), tensor.nbytes(), peer, true});
  }
  for (const auto& [tensor, peer] : received) {
    transfers.push_back({contiguous_data(communicator, tensor), tensor.nbytes(), peer, false});
  }
  communicator.exchange(transfers, what);
}

at::Tensor allocate(NcclCommunicator& communicator, int64_t nbytes) {
  PYDIST_CHECK(nbytes >= 0, UsageError, "cannot allocate ", nbytes, " bytes");
  std::shared_ptr<void> memory = communicator.allocate(static_cast<size_t>(nbytes));
  at::TensorOptions options = at::TensorOptions(at::kByte);
  if (is_cuda()) {
    options = options.device(at::Device(at::kCUDA, static_cast<int8_t>(communicator.device())));
  }
  return at::from_blob(
      memory.get(), {nbytes}, [memory](void*) mutable { memory.reset(); }, options);
}

py::dict counters(const NcclCommunicator& communicator) {
  const NcclCommunicator::Counters counted = communicator.counters();
  py::dict result;
  result["num_calls"] = counted.num_calls;
  result["moved_nbytes"] = counted.moved_nbytes;
  return result;
}

std::pair<int, std::string> open_nccl(const std::string& path) {
  const nccl::Api& api = nccl::api(path);
  return {api.version, api.path};
}

void stop_nccl() {
  NcclWatchdog::instance().stop(kLeave_s);
  stop_ending_nccl(kLeave_s);
}

}  // namespace

void bind_nccl(py::module_& module) {
  NcclCommunicator::set_around_end(&without_gil);
  py::class_<NcclCommunicator, Owner>(
      module, "NcclCommunicator",
      "One group's collectives on a device, over NCCL: they are enqueued on a stream of its own, "
      "ordered with others by after_current_stream() and before_current_stream() alone. Reduce "
      "operations are those of Communicator; `what` says what for, in errors.")
      .def(py::init(&make_communicator), py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("device"), py::arg("timeout_s"), py::arg("name"), py::arg("remedy"),
           py::arg("global_ranks"))
      .def_property_readonly("rank", &NcclCommunicator::rank)
      .def_property_readonly("size", &NcclCommunicator::size)
      .def_property_readonly("device", &NcclCommunicator::device)
      .def_property_readonly("is_registering", &NcclCommunicator::is_registering)
      .def("describe", &NcclCommunicator::describe, py::arg("rank"), NoGil())
      .def("allocate", &allocate, py::arg("nbytes"), NoGil(),
           "Zeroed memory that peers may reach directly, as bytes.")
      .def(
          "after_current_stream",
          [](NcclCommunicator& self) {
            const DeviceGuard guard(self.device());
            self.after(device_runtime()->current_stream());
          },
          NoGil(), "Calls from now on come after what is enqueued on the current stream.")
      .def(
          "before_current_stream",
          [](NcclCommunicator& self) {
            const DeviceGuard guard(self.device());
            self.before(device_runtime()->current_stream());
          },
          NoGil(),
          "What is enqueued on the current stream from now on comes after the calls so far.")
      .def("all_reduce", &all_reduce, py::arg("tensor"), py::arg("op"), py::arg("what"),
           py::arg("divisor") = 0, NoGil(), "In place.")
      .def("reduce_scatter", &reduce_scatter, py::arg("output"), py::arg("input"), py::arg("op"),
           py::arg("what"), py::arg("divisor") = 0, NoGil())
      .def("all_gather", &all_gather, py::arg("output"), py::arg("input"), py::arg("what"), NoGil())
      .def("broadcast", &broadcast, py::arg("tensors"), py::arg("root"), py::arg("what"), NoGil(),
           "Dense tensors of any strides, equal on all ranks, as one call.")
      .def("all_to_all", &all_to_all, py::arg("output"), py::arg("input"), py::arg("what"), NoGil())
      .def("exchange", &exchange, py::arg("sent"), py::arg("received"), py::arg("what"), NoGil(),
           "Messages to and from peers, (tensor, peer) each, as one call.")
      .def("mark", &NcclCommunicator::mark, NoGil())
      .def("is_done", &NcclCommunicator::is_done, py::arg("mark"), NoGil())
      .def("wait", &NcclCommunicator::wait, py::arg("mark"), NoGil())
      .def("check", &NcclCommunicator::check, NoGil(), "Raises what has failed.")
      .def("fail", &NcclCommunicator::fail, py::arg("reason"), NoGil(),
           "Ends the group: every rank raises PeerError with this reason.")
      .def("counters", &counters);
  module.def("open_nccl", &open_nccl, py::arg("path") = "",
             "NCCL's version (22807 for 2.28.7) and its file: the one that is loaded already, else "
             "the one at path. Raises UsageError where there is none that can be used.");
  py::module_::import("atexit").attr("register")(
      py::cpp_function(&stop_nccl, py::call_guard<py::gil_scoped_release>()));
}

}  // namespace pydist
