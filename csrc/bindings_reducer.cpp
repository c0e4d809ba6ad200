// The reducer as Python sees it.
#include <pybind11/functional.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <variant>

#include "base/check.h"
#include "base/hash.h"
#include "bindings.h"
#include "bucket/device_round.h"
#include "bucket/hook_round.h"
#include "bucket/host_round.h"
#include "bucket/pack.h"
#include "bucket/process_group_round.h"
#include "bucket/reducer.h"
#include "bucket/shared_round.h"
#include "transport/c10d_store.h"

namespace py = pybind11;

namespace pydist {

namespace {

// From here on a gradient is reduced where it lies, on a device: packing costs less than a call of
// NCCL's on less than this.
constexpr size_t kDeviceAloneNbytes = size_t{8} << 20;

// The same over hosts: what the network carries in the time that a message of nothing takes.
constexpr size_t kHostsAloneNbytes = size_t{256} << 10;

// torch's name of a type, or None.
WireType wire_type(const py::object& name) {
  if (name.is_none()) return WireType::kSame;
  const auto text = name.cast<std::string>();
  if (text == "float16") return WireType::kFloat16;
  if (text == "bfloat16") return WireType::kBFloat16;
  if (text == "float8_e4m3fn") return WireType::kFloat8;
  throw UsageError(concat("gradients cannot travel as ", text));
}

// Of the memory in which gradients are reduced; float8's blocks and scales are made on the way.
std::optional<DType> unit_type(WireType wire) {
  if (wire == WireType::kFloat16) return DType::kFloat16;
  if (wire == WireType::kBFloat16) return DType::kBFloat16;
  return std::nullopt;
}

Algorithm algorithm(const std::string& name) {
  if (name == "nccl") return Algorithm::kNccl;
  if (name == "ring") return Algorithm::kRing;
  if (name == "slices") return Algorithm::kSlices;
  PYDIST_CHECK(name == "auto", UsageError, "no algorithm is called ", name);
  return Algorithm::kAuto;
}

// To be called without the GIL, and destroyed on any thread.
template <class... Arguments>
std::function<void(Arguments...)> callback(py::object callable) {
  if (callable.is_none()) return nullptr;
  const std::shared_ptr<PyObject> shared(callable.release().ptr(), [](PyObject* object) {
    if (Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire gil;
    Py_DECREF(object);
  });
  return [shared](Arguments... arguments) {
    const py::gil_scoped_acquire gil;
    py::handle(shared.get())(arguments...);
  };
}

ReducerOptions reducer_options(const py::dict& settings) {
  ReducerOptions options;
  options.name = settings["name"].cast<std::string>();
  options.backend = settings["backend"].cast<std::string>();
  options.layout.caps_nbytes = settings["bucket_caps_nbytes"].cast<std::vector<size_t>>();
  options.bucket_view = settings["bucket_view"].cast<bool>();
  options.wire = unit_type(wire_type(settings["wire_dtype"]));
  options.delayed = settings["delayed"].cast<std::vector<int>>();
  options.gate = settings["gate"].cast<int>();
  options.skip_unused = settings["skip_unused"].cast<bool>();
  options.comm_hook = !settings["comm_hook"].is_none();
  options.sparse = settings["sparse"].cast<std::vector<int>>();
  options.average_sparse =
      callback<const std::vector<at::Tensor>&, int, bool, bool>(settings["average_sparse"]);
  options.unused_is_error = settings["unused_is_error"].cast<bool>();
  if (!settings["communicator"].is_none()) {
    options.born_in_arena = false;
    options.layout.alone_nbytes = std::min(kDeviceAloneNbytes, options.layout.caps_nbytes.back());
  }
  options.reduces_alone = settings.contains("reduces_alone");
  return options;
}

// None where ranks average gradients themselves; else hook(state, bucket) of settings["comm_hook"].
std::unique_ptr<c10d::CommHookInterface> make_comm_hook(const py::dict& settings) {
  if (settings["comm_hook"].is_none()) return nullptr;
  const auto [state, hook] = settings["comm_hook"].cast<std::pair<py::object, py::object>>();
  return std::make_unique<c10d::PythonCommHook>(state, hook);
}

// What carries a reducer's rounds, where that is neither shared memory nor a device.
using Carrier = std::variant<c10::intrusive_ptr<c10d::ProcessGroup>, std::shared_ptr<Communicator>>;

std::shared_ptr<HostsCommunicator> hosts_of(const std::optional<Carrier>& carrier) {
  if (!carrier || !std::holds_alternative<std::shared_ptr<Communicator>>(*carrier)) return nullptr;
  auto hosts = std::dynamic_pointer_cast<HostsCommunicator>(
      std::get<std::shared_ptr<Communicator>>(*carrier));
  PYDIST_CHECK(hosts, UsageError, "a reducer's carrier must be a communicator over several hosts");
  return hosts;
}

// How ranks reach each other: over a device, over several hosts, through a process group, or
// through shared memory.
struct Transport {
  std::shared_ptr<NcclCommunicator> communicator;  // may be null
  Algorithm algorithm = Algorithm::kAuto;
  WireType wire = WireType::kSame;
  std::shared_ptr<HostsCommunicator> hosts;  // may be null
  std::optional<c10::intrusive_ptr<c10d::ProcessGroup>> group;
  BoardOptions board;
};

std::unique_ptr<Round> make_round(Transport transport, c10::intrusive_ptr<c10d::Store> store,
                                  at::Device device, RoundOptions plan) {
  if (transport.communicator != nullptr) {
    const DeviceGuard guard(transport.communicator->device());
    auto all_reduce = DeviceAllReduce::create(transport.communicator, transport.algorithm);
    return std::make_unique<DeviceRound>(transport.communicator, std::move(all_reduce),
                                         wrap_c10d_store(std::move(store)), device, transport.wire,
                                         std::move(plan));
  }
  if (transport.hosts != nullptr) {
    return std::make_unique<HostRound>(std::move(transport.hosts), unit_type(transport.wire),
                                       std::move(plan));
  }
  if (transport.group) {
    return std::make_unique<ProcessGroupRound>(*transport.group, wrap_c10d_store(std::move(store)),
                                               std::move(plan));
  }
  return SharedRound::create(*wrap_c10d_store(std::move(store)), std::move(transport.board),
                             std::move(plan));
}

std::shared_ptr<Reducer> make_reducer(std::vector<at::Tensor> parameters,
                                      std::vector<std::string> names,
                                      c10::intrusive_ptr<c10d::Store> store,
                                      const std::optional<Carrier>& carrier, int rank, int size,
                                      double timeout_s, std::vector<int> global_ranks,
                                      const py::dict& settings) {
  ReducerOptions options = reducer_options(settings);
  Transport transport;
  transport.hosts = hosts_of(carrier);
  if (carrier && !transport.hosts) transport.group = std::get<0>(*carrier);
  if (transport.hosts) {
    options.wire.reset();  // gradients are narrow between hosts alone
    size_t& alone_nbytes = options.layout.alone_nbytes;
    alone_nbytes =
        std::max(alone_nbytes, std::min(kHostsAloneNbytes, options.layout.caps_nbytes.back()));
  }
  options.marks_units = !transport.group && !options.comm_hook;
  auto hook = make_comm_hook(settings);
  if (!settings["communicator"].is_none()) {
    transport.communicator = settings["communicator"].cast<std::shared_ptr<NcclCommunicator>>();
  }
  transport.algorithm = algorithm(settings["algorithm"].cast<std::string>());
  transport.wire = wire_type(settings["wire_dtype"]);
  transport.board.rank = rank;
  transport.board.size = size;
  transport.board.name = "the reducer of " + options.name;
  transport.board.remedy = settings["remedy"].cast<std::string>();
  transport.board.clue = settings["clue"].cast<std::string>();
  transport.board.global_ranks = std::move(global_ranks);
  const py::gil_scoped_release no_gil;
  RoundOptions plan = Reducer::plan(parameters, names, options);
  plan.timeout_s = timeout_s;
  plan.remedy = transport.board.remedy;
  std::vector<Unit> units = plan.units;
  RoundOptions carried = hook ? HookRound::inner_options(plan) : plan;
  const at::Device device = parameters.empty() ? at::kCPU : parameters.front().device();
  std::unique_ptr<Round> round =
      make_round(std::move(transport), store, device, std::move(carried));
  if (hook) {
    auto hook_store = c10::make_intrusive<c10d::PrefixStore>("comm_hook", std::move(store));
    round = std::make_unique<HookRound>(std::move(round), std::move(hook),
                                        wrap_c10d_store(std::move(hook_store)), parameters,
                                        std::move(plan));
  }
  return std::make_shared<Reducer>(std::move(parameters), std::move(names), std::move(units),
                                   std::move(round), options);
}

py::dict counters(const Reducer& reducer) {
  py::dict result;
  result["num_rounds"] = reducer.counters().num_rounds;
  result["born_nbytes"] = reducer.counters().born_nbytes;
  result["packed_nbytes"] = reducer.counters().packed_nbytes;
  result["moved_nbytes"] = reducer.round().moved_nbytes();
  result["wait_s"] = reducer.round().wait_s();
  return result;
}

double seconds(int64_t ns) { return 1e-9 * static_cast<double>(ns); }

// Cumulative seconds, by the names of report.Report.
py::dict times(const Reducer& reducer) {
  const StepTimes& times = reducer.stats().times();
  py::dict result;
  result["forward_s"] = seconds(times.forward_ns);
  result["backward_s"] = seconds(times.backward_ns);
  result["hidden_s"] = seconds(reducer.round().hidden_ns());
  result["waiting_s"] = seconds(times.waiting_ns);
  result["reducing_s"] = seconds(times.reducing_ns);
  result["total_s"] = seconds(times.total_ns);
  return result;
}

// (rounds in which it came last, mean seconds that the others waited for it) of every rank.
py::list late(const Reducer& reducer) {
  py::list result;
  for (const Lateness& late : reducer.stats().late()) {
    result.append(py::make_tuple(late.num_last, seconds(late.waited_ns)));
  }
  return result;
}

// (forward, backward, first publication, end of backward, end) of the last round, monotonic.
std::vector<int64_t> last_round_ns(const Reducer& reducer) {
  const RoundTimes& last = reducer.stats().last_round();
  return {last.forward_ns, last.backward_ns, last.published_ns, last.backward_end_ns,
          last.finished_ns};
}

py::list units(const Reducer& reducer) {
  py::list result;
  for (const Unit& unit : reducer.units()) {
    py::list members;
    for (const Member& member : unit.members) members.append(member.parameter);
    result.append(py::make_tuple(unit.alone, unit.nbytes(), members));
  }
  return result;
}

// Indices of the tensors that somebody beside their Python objects holds, or whose memory another
// tensor has too: a graph that saved them, or a view of them.
std::vector<int> held_elsewhere(const py::list& tensors) {
  std::vector<int> held;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors.ptr(), i));
    const bool alone =
        tensor.use_count() == 1 && tensor.has_storage() && tensor.storage().use_count() == 1;
    if (!alone) held.push_back(static_cast<int>(i));
  }
  return held;
}

// Copies contiguous tensors one after the other into `out`; for the benchmark.
void pack_tensors(const std::vector<at::Tensor>& tensors, const at::Tensor& out, int iterations) {
  std::vector<PackItem> items;
  auto* target = static_cast<uint8_t*>(out.data_ptr());
  size_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    items.push_back({tensor.data_ptr(), DType::kUInt8, target + offset, DType::kUInt8,
                     static_cast<int64_t>(tensor.nbytes())});
    offset += tensor.nbytes();
  }
  if (offset > out.nbytes()) {
    throw UsageError(concat("pack: tensors have ", offset, " bytes, out only ", out.nbytes()));
  }
  for (int i = 0; i < iterations; ++i) pack(items);
}

// True if each dict's values are, one after the other, the very objects of its tuple. A few ns per
// object, for it is asked before every forward.
bool dicts_hold(const py::list& dicts, const py::list& values) {
  for (size_t i = 0; i < dicts.size(); ++i) {
    const auto dict = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(dicts.ptr(), i));
    const py::handle expected = PyList_GET_ITEM(values.ptr(), i);
    if (!PyDict_Check(dict.ptr()) || !PyTuple_Check(expected.ptr())) {
      throw py::type_error("dicts_hold needs a list of dicts and a list of tuples");
    }
    const Py_ssize_t size = PyTuple_GET_SIZE(expected.ptr());
    Py_ssize_t position = 0;
    Py_ssize_t count = 0;
    PyObject* value = nullptr;
    while (PyDict_Next(dict.ptr(), &position, nullptr, &value) != 0) {
      if (count == size || PyTuple_GET_ITEM(expected.ptr(), count) != value) return false;
      ++count;
    }
    if (count != size) return false;
  }
  return true;
}

std::vector<uint64_t> hash_tensors(const std::vector<at::Tensor>& tensors) {
  std::vector<uint64_t> hashes;
  hashes.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_cpu() || !tensor.is_contiguous()) {
      throw UsageError("hash_tensors: expected contiguous tensors on the CPU");
    }
    hashes.push_back(hash_memory(tensor.data_ptr(), tensor.nbytes()));
  }
  return hashes;
}

}  // namespace

void bind_reducer(py::module_& module) {
  py::class_<Reducer, std::shared_ptr<Reducer>>(
      module, "Reducer",
      "Averages the gradients of a module's backwards; see csrc/bucket/reducer.h.")
      .def(py::init(&make_reducer), py::arg("parameters"), py::arg("names"), py::arg("store"),
           py::arg("carrier"), py::arg("rank"), py::arg("size"), py::arg("timeout_s"),
           py::arg("global_ranks"), py::arg("settings"),
           "Collective. `carrier` is None for shared memory, else the process group or the "
           "communicator over hosts to use.")
      .def("prepare", &Reducer::prepare, py::arg("synchronize"),
           "To be called before a forward whose backward is wanted: hooks what is new, and raises "
           "where parameters have changed or the group has failed.")
      .def(
          "watch", &Reducer::watch, py::arg("outputs"), py::arg("synchronize"),
          py::call_guard<py::gil_scoped_release>(),
          "To be called with a forward's output tensors: their backward is a round if synchronize.")
      .def("set_divisor", &Reducer::set_divisor, py::arg("divisor"),
           "From the next round on the mean divides by this; 0: by the number of ranks.")
      .def(
          "set_before_end",
          [](Reducer& reducer, py::object action) {
            reducer.set_before_end(callback<>(std::move(action)));
          },
          py::arg("action"),
          "Runs at the end of each backward, before this rank waits for the others; or None.")
      .def("shadow_round", &Reducer::shadow_round, py::arg("divisor"), py::arg("receives"),
           py::call_guard<py::gil_scoped_release>(),
           "Takes part in a round of the others with zeros; `.grad` become the means if receives.")
      .def("begin_backward", &Reducer::begin_backward, py::arg("last"),
           py::call_guard<py::gil_scoped_release>(),
           "Before one of many backwards that the caller brackets; the last opens the round.")
      .def("end_backward", &Reducer::end_backward, py::call_guard<py::gil_scoped_release>(),
           "After it; the last one's publishes what is missing, and does not wait.")
      .def("progress", &Reducer::progress, py::call_guard<py::gil_scoped_release>(),
           "Reduces what all ranks have published so far.")
      .def("finish_round", &Reducer::finish_round, py::call_guard<py::gil_scoped_release>(),
           "Waits until the bracketed round's means are in `.grad`.")
      .def("give_up", &Reducer::give_up, py::arg("reason"),
           py::call_guard<py::gil_scoped_release>(),
           "Ends the bracketed round, open or still to come, on all ranks, for good.")
      .def("detach_hooks", &Reducer::detach_hooks, "Removes every hook; the module may live on.")
      .def("published", &Reducer::published, "Units handed to the round since the last one began.")
      .def("replace", &Reducer::replace, py::arg("index"), py::arg("parameter"),
           "The module has another tensor in a parameter's place, with the same layout.")
      .def("parameters", &Reducer::parameters, "The parameters as they are watched now.")
      .def("fail", &Reducer::fail, py::arg("reason"),
           "Tells peers that this rank will not train on; they raise in their next round.")
      .def("counters", &counters, "What report.Report shows, by name.")
      .def("times", &times, "Cumulative seconds of forward, backward and communication, by name.")
      .def("late", &late,
           "Per rank: rounds in which it came last, and mean seconds that others waited for it.")
      .def("last_round_ns", &last_round_ns,
           "When the last round's forward began, its backward began, the first unit was published, "
           "backward ended and all means were there: on the monotonic clock.")
      .def("discount_wait", &Reducer::discount_wait, py::arg("waited_ns"),
           "Tells of time in which this rank waited for others, which does not make it late.")
      .def_property_readonly(
          "num_rounds", [](const Reducer& reducer) { return reducer.counters().num_rounds; },
          "Rounds so far.")
      .def_property_readonly("last_error", &Reducer::last_error,
                             "What this rank raised last in a backward; empty if nothing.")
      .def("ready_order", &Reducer::ready_order,
           "Indices of parameters as their gradients became ready in the last round.")
      .def("unused_by_rank", &Reducer::unused_by_rank,
           "(parameter, ranks that did not use it) in the last round, for trainable parameters.")
      .def("units", &units, "(alone, nbytes, parameters) of every unit.")
      .def_property_readonly("last_round_had_unused", &Reducer::last_round_had_unused,
                             "True if no rank used some trainable parameter in the last round.")
      .def_property_readonly("last_round_changed", &Reducer::last_round_changed,
                             "True if the last round used other parameters than the first.")
      .def_property_readonly("has_unreduced", &Reducer::has_unreduced,
                             "True if gradients of backwards since the last round are waiting.")
      .def_property_readonly("ever_changed", &Reducer::ever_changed,
                             "True if some round used other parameters than the first.")
      .def_property_readonly("has_failed", &Reducer::has_failed,
                             "True if no further round is possible, as far as this rank knows.")
      .def_property_readonly("is_open", &Reducer::is_open, "True while a round is going on.")
      .def("call_after_round", &Reducer::call_after_round, py::arg("action"),
           "Runs action() once, at the end of the next round.")
      .def("unused_in_last_round", &Reducer::unused_in_last_round,
           "Indices of trainable parameters that no rank used in the last round.")
      .def("changed_since_first_round", &Reducer::changed_since_first_round,
           "Indices of parameters that only one of the first and the last round used.");
  module.def("dicts_hold", &dicts_hold, py::arg("dicts"), py::arg("values"),
             "True if each dict's values are, one after the other, the very objects of its tuple.");
  module.def("held_elsewhere", &held_elsewhere, py::arg("tensors"),
             "Indices of the tensors that a graph or another tensor holds, or shares memory with.");
  module.def("hash_tensors", &hash_tensors, py::arg("tensors"),
             py::call_guard<py::gil_scoped_release>(),
             "A 64-bit hash of the bytes of each contiguous CPU tensor; see csrc/base/hash.h.");
  module.def("pack", &pack_tensors, py::arg("tensors"), py::arg("out"), py::arg("iterations") = 1,
             "Copies contiguous tensors one after the other into out; for the benchmark.");
  module.def("install_allocator", &GradientAllocator::install,
             "Installs the gradient allocator; an empty string, or why it cannot be used.");
}

}  // namespace pydist
