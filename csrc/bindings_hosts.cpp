// How Python makes a communicator over several hosts: of the ranks of this one, and of torch's
// process groups between them.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "backend/process_group_network.h"
#include "backend/stream_messages.h"
#include "base/check.h"
#include "bindings.h"
#include "collective/hosts_communicator.h"
#include "collective/shm_communicator.h"
#include "transport/c10d_store.h"

namespace py = pybind11;

namespace pydist {

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// What Python knows of a group over hosts.
struct HostsDescription {
  int rank;
  std::vector<std::vector<int>> hosts;  // each one's ranks
  double timeout_s;
  std::string name;
  std::vector<std::string> ranks;  // how messages call them, by rank
  std::vector<std::string> host_names;
  std::string remedy;
  std::string clue;
};

// One rank's part of this host's board: what the whole group's failures are told through.
std::shared_ptr<ShmCommunicator> make_local(c10::intrusive_ptr<c10d::Store> store,
                                            const HostsDescription& description) {
  const HostLayout layout(description.hosts);
  BoardOptions options;
  options.rank = layout.local_of(description.rank);
  for (const int r : layout.ranks_of(layout.host_of(description.rank))) {
    options.global_ranks.push_back(r);
    options.names.push_back(description.ranks[r]);
  }
  options.size = static_cast<int>(options.names.size());
  options.timeout_s = description.timeout_s;
  options.name = description.name;
  options.remedy = description.remedy;
  options.clue = description.clue;
  options.waits_fail_group = false;
  const std::unique_ptr<Store> meeting = wrap_c10d_store(std::move(store));
  return ShmCommunicator::create(*meeting, std::move(options));
}

std::shared_ptr<Network> network_of(const std::optional<Group>& group) {
  if (!group) return nullptr;
  return std::make_shared<ProcessGroupNetwork>((*group)->getBackend(c10::DeviceType::CPU));
}

// The ranks of this host, who have their board; it waits for the groups between hosts.
class HostsMaker {
 public:
  HostsMaker(c10::intrusive_ptr<c10d::Store> store, HostsDescription description)
      : description_(std::move(description)) {
    const py::gil_scoped_release no_gil;
    local_ = make_local(std::move(store), description_);
  }
  ~HostsMaker() {
    const py::gil_scoped_release no_gil;
    local_.reset();
  }

  std::shared_ptr<Communicator> make(const c10::intrusive_ptr<c10d::Store>& store,
                                     const std::optional<Group>& lane,
                                     const std::optional<Group>& flat) {
    PYDIST_CHECK(local_, UsageError, "a communicator has been made of this already");
    const py::gil_scoped_release no_gil;
    HostsTeam team{HostLayout(description_.hosts),
                   description_.rank,
                   std::move(local_),
                   network_of(lane),
                   network_of(flat),
                   description_.timeout_s};
    std::unique_ptr<HostsMessages> messages;
    if (flat) {
      const std::shared_ptr<Board> board(team.local, &team.local->board());
      messages =
          std::make_unique<StreamMessages>(*flat, board, description_.ranks, description_.name);
    }
    HostsOptions options;
    options.name = description_.name;
    options.ranks = description_.ranks;
    options.host_names = description_.host_names;
    options.timeout_s = description_.timeout_s;
    options.remedy = description_.remedy;
    return without_gil_at_end(
        std::make_shared<HostsCommunicator>(std::move(team), wrap_c10d_store(own_connection(store)),
                                            std::move(messages), std::move(options)));
  }

 private:
  HostsDescription description_;
  std::shared_ptr<ShmCommunicator> local_;
};

std::unique_ptr<HostsMaker> start_hosts(c10::intrusive_ptr<c10d::Store> store, int rank,
                                        std::vector<std::vector<int>> hosts, double timeout_s,
                                        std::string name, std::vector<std::string> ranks,
                                        std::vector<std::string> host_names, std::string remedy,
                                        std::string clue) {
  return std::make_unique<HostsMaker>(
      std::move(store),
      HostsDescription{rank, std::move(hosts), timeout_s, std::move(name), std::move(ranks),
                       std::move(host_names), std::move(remedy), std::move(clue)});
}

}  // namespace

void bind_hosts(py::module_& module) {
  py::class_<HostsMaker>(module, "HostsMaker",
                         "A communicator over several hosts, of which this one's part is made.")
      .def(py::init(&start_hosts), py::arg("store"), py::arg("rank"), py::arg("hosts"),
           py::arg("timeout_s"), py::arg("name"), py::arg("ranks"), py::arg("host_names"),
           py::arg("remedy"), py::arg("clue"),
           "Collective over the ranks of each host. Raises HostError where those do not share one.")
      .def("make", &HostsMaker::make, py::arg("store"), py::arg("lane"), py::arg("flat"),
           "Collective. `lane` is of the ranks with this one's index on their hosts, None where it "
           "has none; `flat` of all ranks, None where only sums are needed.");
}

}  // namespace pydist
