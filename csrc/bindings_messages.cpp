// Messages, counters and the monitored barrier of a communicator, as Python sees them.
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings_communicator.h"

namespace py = pybind11;

namespace pydist {

namespace {

void send(const SharedCommunicator& communicator, const at::Tensor& tensor, int destination,
          int64_t tag) {
  const Buffer buffer = contiguous_buffer(tensor, Arithmetic::kNone);
  const py::gil_scoped_release no_gil;
  communicator->send(buffer, destination, tag);
}

int receive(const SharedCommunicator& communicator, const at::Tensor& tensor,
            std::optional<int> source, int64_t tag) {
  const Buffer buffer = contiguous_buffer(tensor, Arithmetic::kNone);
  const py::gil_scoped_release no_gil;
  return communicator->receive(buffer, source.value_or(Communicator::kAnySource), tag);
}

PyRequest start_send(const SharedCommunicator& communicator, const at::Tensor& tensor,
                     int destination, int64_t tag) {
  const Buffer buffer = contiguous_buffer(tensor, Arithmetic::kNone);
  auto keep_alive = std::make_shared<at::Tensor>(tensor);
  const py::gil_scoped_release no_gil;
  return {communicator, communicator->start_send(buffer, destination, tag, std::move(keep_alive))};
}

PyRequest start_receive(const SharedCommunicator& communicator, const at::Tensor& tensor,
                        std::optional<int> source, int64_t tag) {
  const Buffer buffer = contiguous_buffer(tensor, Arithmetic::kNone);
  auto keep_alive = std::make_shared<at::Tensor>(tensor);
  const py::gil_scoped_release no_gil;
  return {communicator,
          communicator->start_receive(buffer, source.value_or(Communicator::kAnySource), tag,
                                      std::move(keep_alive))};
}

// Those that were used, by the names that users call. Two ways to broadcast have one name.
py::dict counts(const Communicator& communicator) {
  const CommunicatorCounts found = communicator.counts();
  py::dict counts;
  const auto add = [&](const char* name, const OperationCount& count) {
    if (count.calls == 0) return;
    uint64_t calls = count.calls, nbytes = count.nbytes;
    if (counts.contains(name)) {
      const auto earlier = counts[name].cast<py::tuple>();
      calls += earlier[0].cast<uint64_t>();
      nbytes += earlier[1].cast<uint64_t>();
    }
    counts[name] = py::make_tuple(calls, nbytes);
  };
  for (size_t k = 0; k < kNumOperations; ++k) {
    add(operation_name(static_cast<Operation>(k)), found.collectives[k]);
  }
  add("send", found.sent);
  add("recv", found.received);
  return counts;
}

void monitored_barrier(const SharedCommunicator& communicator, std::optional<double> timeout_s,
                       bool wait_all_ranks) {
  const py::gil_scoped_release no_gil;
  communicator->monitored_barrier(timeout_s.value_or(communicator->timeout_s()), wait_all_ranks);
}

}  // namespace

void bind_messages(CommunicatorClass& communicator) {
  communicator
      .def("send", &send, py::arg("tensor"), py::arg("destination"), py::arg("tag"),
           "Returns when the tensor may change again.")
      .def("receive", &receive, py::arg("tensor"), py::arg("source"), py::arg("tag"),
           "From a rank, or from any where None; returns the source.")
      .def("start_send", &start_send, py::arg("tensor"), py::arg("destination"), py::arg("tag"),
           "The same without waiting; the tensor may change once the request has ended.")
      .def("start_receive", &start_receive, py::arg("tensor"), py::arg("source"), py::arg("tag"),
           "The same without waiting; Request.source is the source.")
      .def("counts", &counts,
           "By operation, of this rank: (calls that ended well, bytes of its tensors in them).")
      .def("monitored_barrier", &monitored_barrier, py::arg("timeout_s"), py::arg("wait_all_ranks"),
           "A barrier that raises TimeoutError with the names of ranks that do not come; None: the "
           "group's time limit.");
}

}  // namespace pydist
