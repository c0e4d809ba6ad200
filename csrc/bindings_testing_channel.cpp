// The channel between stages as Python sees it: what PipelineParallel passes on, and tests talk to.
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/error.h"
#include "bindings.h"
#include "pipeline/channel_factory.h"
#include "pipeline/replay_channel.h"

namespace py = pybind11;

namespace pydist {

namespace {

// (kind, stage, microbatch, port)
using KeyTuple = std::tuple<std::string, int, int, int>;
// (tensor or None, requires_grad)
using SlotTuple = std::pair<std::optional<at::Tensor>, bool>;

template <class Kind>
Kind kind_of(const std::string& name, std::initializer_list<const char*> names) {
  int index = 0;
  for (const char* candidate : names) {
    if (name == candidate) return static_cast<Kind>(index);
    ++index;
  }
  throw UsageError(name + " is no such kind");
}

StepKind step_kind(const std::string& name) {
  return kind_of<StepKind>(name, {"train", "evaluate", "forward"});
}

MessageKey message_key(const KeyTuple& key) {
  const auto& [kind, stage, microbatch, port] = key;
  return {kind_of<MessageKind>(kind, {"activation", "gradient", "result"}), stage, microbatch,
          port};
}

std::shared_ptr<Channel> create(c10::intrusive_ptr<c10d::Store> store,
                                std::optional<c10::intrusive_ptr<c10d::ProcessGroup>> group,
                                int rank, int size, double timeout_s, std::vector<int> global_ranks,
                                std::string name, size_t ring_nbytes,
                                std::optional<size_t> max_lent_nbytes,
                                const std::optional<at::Device>& device,
                                std::vector<std::pair<int, int>> links) {
  const py::gil_scoped_release no_gil;
  ChannelOptions options;
  options.rank = rank;
  options.size = size;
  options.timeout_s = timeout_s;
  options.global_ranks = std::move(global_ranks);
  options.name = std::move(name);
  options.ring_nbytes = ring_nbytes;
  if (max_lent_nbytes) options.max_lent_nbytes = *max_lent_nbytes;
  std::optional<DeviceLinkOptions> device_options;
  if (device) device_options = DeviceLinkOptions{*device, std::move(links)};
  return make_channel(std::move(store), std::move(group), options, device_options);
}

void send(Channel& channel, int destination, const KeyTuple& key,
          const std::vector<SlotTuple>& slots, const py::bytes& structure, bool absent) {
  Message message{message_key(key), absent, structure};
  for (const auto& [tensor, requires_grad] : slots) {
    message.slots.push_back({tensor.value_or(at::Tensor()), requires_grad});
  }
  const py::gil_scoped_release no_gil;
  channel.send(destination, std::move(message));
}

// (slots, structure, absent)
py::tuple receive(Channel& channel, int source, const KeyTuple& key, const std::string& purpose) {
  Message message;
  {
    const py::gil_scoped_release no_gil;
    message = channel.receive(source, message_key(key), [&] { return purpose; });
  }
  std::vector<SlotTuple> slots;
  for (Slot& slot : message.slots) {
    std::optional<at::Tensor> tensor;
    if (slot.tensor.defined()) tensor = std::move(slot.tensor);
    slots.emplace_back(std::move(tensor), slot.requires_grad);
  }
  return py::make_tuple(std::move(slots), py::bytes(message.structure), message.absent);
}

void flush(Channel& channel, const std::string& purpose) {
  const py::gil_scoped_release no_gil;
  channel.flush([&] { return purpose; });
}

void end_step(Channel& channel, const std::string& purpose) {
  const py::gil_scoped_release no_gil;
  channel.end_step([&] { return purpose; });
}

py::dict counters(const Channel& channel) {
  const ChannelCounters counters = channel.counters();
  py::dict result;
  result["num_messages"] = counters.num_messages;
  result["moved_nbytes"] = counters.moved_nbytes;
  result["num_inline"] = counters.num_inline;
  result["peak_parked"] = counters.peak_parked;
  result["num_dropped"] = counters.num_dropped;
  result["device_nbytes"] = counters.device_nbytes;
  result["num_described"] = counters.num_described;
  result["lent_nbytes"] = counters.lent_nbytes;
  result["pool_nbytes"] = counters.pool_nbytes;
  return result;
}

}  // namespace

void bind_testing_channel(py::module_& module) {
  py::class_<Channel, std::shared_ptr<Channel>>(
      module, "Channel", "What stages send each other; see csrc/pipeline/channel.h.")
      .def(py::init(&create), py::arg("store"), py::arg("group"), py::arg("rank"), py::arg("size"),
           py::arg("timeout_s"), py::arg("global_ranks"), py::arg("name"),
           py::arg("ring_nbytes") = 0, py::arg("max_lent_nbytes") = std::nullopt,
           py::arg("device") = std::nullopt, py::arg("links") = std::vector<std::pair<int, int>>(),
           "Collective. `group` is None for shared memory, else the process group to use, which "
           "must be the channel's own. `device`: where this rank's tensors are, if not on the "
           "CPU; `links`: which (from, to) will send some, the same on all ranks.")
      .def_property_readonly("rank", &Channel::rank, "In the group.")
      .def_property_readonly("size", &Channel::size, "Ranks of the group.")
      .def("describe", &Channel::describe, py::arg("rank"), "'rank 1 (pid 1234)'")
      .def(
          "begin_step",
          [](Channel& channel, const std::string& kind) {
            const py::gil_scoped_release no_gil;
            channel.begin_step(step_kind(kind));
          },
          py::arg("kind"), "kind: train, evaluate or forward.")
      .def("send", &send, py::arg("destination"), py::arg("key"), py::arg("slots"),
           py::arg("structure") = py::bytes(), py::arg("absent") = false,
           "key: (activation, gradient or result; stage; microbatch; port). slots: pairs of a "
           "tensor or None and requires_grad.")
      .def("receive", &receive, py::arg("source"), py::arg("key"), py::arg("purpose") = "",
           "(slots, structure, absent) of the message with this key.")
      .def(
          "has_arrived",
          [](Channel& channel, int source, const KeyTuple& key) {
            const py::gil_scoped_release no_gil;
            return channel.has_arrived(source, message_key(key));
          },
          py::arg("source"), py::arg("key"), "Whether receive() would return at once.")
      .def("flush", &flush, py::arg("purpose") = "", "Waits until nothing sent is kept here.")
      .def("end_step", &end_step, py::arg("purpose") = "", "Waits until all have ended the step.")
      .def("fail", &Channel::fail, py::arg("reason"), py::call_guard<py::gil_scoped_release>(),
           "Ends the step on all ranks.")
      .def("counters", &counters, "Messages and bytes so far, by name.");
  py::class_<ReplayChannel, Channel, std::shared_ptr<ReplayChannel>>(
      module, "ReplayChannel", "Steps without peers; see csrc/pipeline/replay_channel.h.")
      .def(py::init<std::shared_ptr<Channel>>(), py::arg("real"))
      .def("replay", &ReplayChannel::replay,
           "From the next step on, what was received in the last one.");
}

}  // namespace pydist
