// The backend of torch.distributed as Python sees it: a subclass of torch's own.
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>

#include "backend/backend.h"
#include "bindings.h"
#include "collective/communicator.h"

namespace py = pybind11;

namespace pydist {

namespace {

using Options = c10d::Backend::Options;

// A Python function that any thread may call and let go of.
Backend::Split split_in_python(py::function function) {
  const std::shared_ptr<py::function> shared(new py::function(std::move(function)),
                                             [](py::function* held) {
                                               const py::gil_scoped_acquire gil;
                                               delete held;
                                             });
  return [shared](const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                  const c10::intrusive_ptr<Options>& options) {
    const py::gil_scoped_acquire gil;
    return (*shared)(store, ranks, options).cast<c10::intrusive_ptr<c10d::Backend>>();
  };
}

c10::intrusive_ptr<Backend> make_backend(std::shared_ptr<Communicator> communicator,
                                         const std::vector<uint64_t>& global_ranks,
                                         const std::string& group_name, py::function split) {
  const auto timeout = std::chrono::duration<double>(communicator->timeout_s());
  auto options = c10::make_intrusive<Options>(
      "pydist", std::chrono::duration_cast<std::chrono::milliseconds>(timeout));
  options->group_name = group_name;
  options->global_ranks_in_group = global_ranks;
  return c10::make_intrusive<Backend>(std::move(communicator), std::move(options),
                                      split_in_python(std::move(split)));
}

py::dict counts(const Backend& backend) {
  const CommunicatorCounts counts = backend.communicator()->counts();
  std::map<std::string, OperationCount> by_name;  // two operations are called broadcast
  const auto add = [&by_name](const char* name, const OperationCount& count) {
    by_name[name].calls += count.calls;
    by_name[name].nbytes += count.nbytes;
  };
  for (size_t i = 1; i < kNumOperations; ++i) {  // 0 is a call that came no further
    add(operation_name(static_cast<Operation>(i)), counts.collectives[i]);
  }
  add("send", counts.sent);
  add("recv", counts.received);
  py::dict dict;
  for (const auto& [name, count] : by_name) {
    py::dict entry;
    entry["calls"] = count.calls;
    entry["nbytes"] = count.nbytes;
    dict[py::str(name)] = entry;
  }
  return dict;
}

}  // namespace

void bind_backend(py::module_& module) {
  py::module_::import("torch._C._distributed_c10d");  // has the class that ours is a subclass of
  py::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend>(
      module, "Backend", "The backend \"pydist\" of torch.distributed, over a communicator.")
      .def(py::init(&make_backend), py::arg("communicator"), py::arg("global_ranks"),
           py::arg("group_name"), py::arg("split"))
      .def_property_readonly("communicator", &Backend::communicator)
      .def_property_readonly("options", &Backend::getBackendOptions)
      .def("counts", &counts,
           "Calls and bytes of this rank, by operation, since the group was made.");
}

}  // namespace pydist
