#include "pipeline/device_links.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/check.h"
#include "pipeline/own_memory.h"
#include "pipeline/slot_form.h"
#include "transport/c10d_store.h"

namespace pydist {

namespace {

using Transfer = NcclCommunicator::Transfer;

// A send occupies its share of the device until the receiver comes, beside the stages' own kernels.
constexpr int kMaxCtas = 4;

// Memory that nobody changes while it is sent, as it lies: without gaps, conjugation or negation.
at::Tensor for_sending(at::Tensor tensor) {
  if (tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg() &&
      !tensor._is_zerotensor()) {
    return in_own_memory(std::move(tensor));
  }
  const at::NoGradGuard no_grad;
  const auto strides = at::infer_dense_strides(tensor.sizes(), tensor.strides());
  const auto options = at::TensorOptions(tensor.scalar_type()).device(tensor.device());
  return at::empty_strided(tensor.sizes(), strides, options).copy_(tensor);
}

void* memory_of(const at::Tensor& tensor) {
  return const_cast<void*>(tensor.const_data_ptr());  // a send only reads it
}

// What the device may still use stays for good.
void keep_for_good(std::vector<at::Tensor>& tensors) {
  (void)new std::vector<at::Tensor>(std::move(tensors));
}

// A call that raises may have enqueued its transfers already.
template <class Call>
void moving(std::vector<at::Tensor>& tensors, const Call& call) {
  try {
    call();
  } catch (...) {
    keep_for_good(tensors);
    throw;
  }
}

// At the end of a link, which waits for the device: that may have failed.
void let_go(const OwnedEvent& done, std::vector<at::Tensor>& tensors) noexcept {
  try {
    if (!tensors.empty() && !done.is_complete()) keep_for_good(tensors);
  } catch (...) {
    keep_for_good(tensors);
  }
}

// NCCL connects two ranks at their first message, for which both have to be inside of it; but the
// receiver of a message enters it only once the sender is through. So the first one is of no use.
void send_first(NcclCommunicator& communicator) {
  constexpr size_t kNbytes = 4;
  DeviceRuntime& runtime = *device_runtime();
  void* memory = runtime.allocate(kNbytes);
  communicator.exchange({{memory, kNbytes, 1 - communicator.rank(), communicator.rank() == 0}},
                        "the first message");
  communicator.wait(communicator.mark());
  runtime.deallocate(memory);  // not after a failure: the device may still use it
}

}  // namespace

class DeviceLinks::Arrival {
 public:
  MessageKey key;
  std::string what;                                 // for messages
  std::string forms;                                // what the places were read from
  std::vector<std::pair<size_t, SlotForm>> places;  // of tensors that the device receives
  std::vector<at::Tensor> tensors = {};
  std::optional<OwnedEvent> done = std::nullopt;  // where there is memory to receive
  bool captured = false;
};

struct DeviceLinks::Outbox {
  DescriptionWriter descriptions = {};
  std::deque<InFlight> in_flight = {};
  std::shared_ptr<NcclCommunicator> communicator = nullptr;  // null where no tensors go this way

  ~Outbox() {
    communicator.reset();
    for (InFlight& sent : in_flight) {
      if (!sent.captured) let_go(sent.done, sent.tensors);
    }
  }
  bool has(bool captured) const {
    return !in_flight.empty() && in_flight.back().captured == captured;
  }
};

struct DeviceLinks::Inbox {
  // Memory for the next message of one place in the pipeline, made before the work that follows on
  // the last one: its receive need not wait for that.
  struct Next {
    MessageKey key;
    std::string forms;
    Stream stream;
    std::vector<at::Tensor> tensors;  // empty once they are in use
    OwnedEvent made;
  };

  DescriptionReader descriptions = {};
  std::deque<std::shared_ptr<Arrival>> announced = {};
  std::deque<std::shared_ptr<Arrival>> posted = {};  // until they are there
  std::vector<Next> next = {};
  std::shared_ptr<NcclCommunicator> communicator = nullptr;

  ~Inbox() {
    communicator.reset();
    for (const auto& arrival : posted) {
      if (!arrival->captured) let_go(*arrival->done, arrival->tensors);
    }
  }
  bool has(bool captured) const { return !posted.empty() && posted.back()->captured == captured; }
  Next* find_next(const MessageKey& key) {
    const auto found = std::find_if(next.begin(), next.end(), [&](const Next& each) {
      return each.key.kind == key.kind && each.key.stage == key.stage && each.key.port == key.port;
    });
    return found == next.end() ? nullptr : &*found;
  }
};

// -- set-up --------------------------------------------------------------------------------------

DeviceLinks::DeviceLinks(const c10::intrusive_ptr<c10d::Store>& store,
                         const ChannelOptions& options, const DeviceLinkOptions& device)
    : rank_(options.rank), device_(device.device) {
  PYDIST_CHECK(device_runtime() != nullptr, Error, "no device runtime is registered");
  // Memory of the CPU is a device's only where the tests emulate one.
  device_index_ =
      device_.is_cpu() ? device_runtime()->current_device() : static_cast<int>(device_.index());
  for (int r = 0; r < options.size; ++r) {
    outboxes_.push_back(std::make_unique<Outbox>());
    inboxes_.push_back(std::make_unique<Inbox>());
  }
  const DeviceGuard guard(device_index_);
  const auto own = own_connection(store);
  for (const auto& link : device.links) connect(own, options, link);
}

// In the same order on all ranks, so that none waits for one that waits for it.
void DeviceLinks::connect(const c10::intrusive_ptr<c10d::Store>& store,
                          const ChannelOptions& options, std::pair<int, int> link) {
  const auto [from, to] = link;
  if (rank_ != from && rank_ != to) return;
  NcclOptions nccl;
  nccl.rank = rank_ == from ? 0 : 1;
  nccl.size = 2;
  nccl.device = device_index_;
  nccl.timeout_s = options.timeout_s;
  nccl.name = concat(options.name, "'s link from rank ", from, " to rank ", to);
  nccl.max_ctas = kMaxCtas;
  nccl.remedy = "make the pipeline again on every rank, or restart the job";
  nccl.global_ranks = options.global_ranks.empty()
                          ? std::vector<int>{from, to}
                          : std::vector<int>{options.global_ranks[static_cast<size_t>(from)],
                                             options.global_ranks[static_cast<size_t>(to)]};
  auto own = c10::make_intrusive<c10d::PrefixStore>(concat("link/", from, "/", to), store);
  auto communicator = NcclCommunicator::create(wrap_c10d_store(std::move(own)), nccl);
  send_first(*communicator);
  if (rank_ == from) {
    outbox(to).communicator = std::move(communicator);
  } else {
    inbox(from).communicator = std::move(communicator);
  }
}

DeviceLinks::~DeviceLinks() = default;

void DeviceLinks::forget() noexcept {
  for (auto& outbox : outboxes_) (void)outbox.release();
  for (auto& inbox : inboxes_) (void)inbox.release();
}

template <class Visit>
void DeviceLinks::for_each_communicator(Visit&& visit) {
  for (const auto& outbox : outboxes_) {
    if (outbox != nullptr && outbox->communicator != nullptr) visit(*outbox->communicator);
  }
  for (const auto& inbox : inboxes_) {
    if (inbox != nullptr && inbox->communicator != nullptr) visit(*inbox->communicator);
  }
}

void DeviceLinks::check() {
  for_each_communicator([](NcclCommunicator& communicator) { communicator.check(); });
}

void DeviceLinks::abandon(const std::string& reason) noexcept {
  for_each_communicator([&](NcclCommunicator& communicator) { communicator.fail(reason); });
}

uint64_t DeviceLinks::num_described() const {
  uint64_t sum = 0;
  for (const auto& outbox : outboxes_) sum += outbox->descriptions.num_described();
  return sum;
}

// -- steps ---------------------------------------------------------------------------------------

void DeviceLinks::begin_step() {
  const DeviceGuard guard(device_index_);
  stream_ = device_runtime()->current_stream();
  capturing_ = device_runtime()->is_capturing(stream_);
  has_graph_ = has_graph_ || capturing_;
  drop_captured();  // of a step that failed
  for (const auto& inbox : inboxes_) {
    std::vector<Inbox::Next>& next = inbox->next;  // of no use on another stream
    next.erase(
        std::remove_if(next.begin(), next.end(),
                       [&](const auto& each) { return has_graph_ || each.stream != stream_; }),
        next.end());
  }
  post();
}

void DeviceLinks::end_step() {
  const DeviceGuard guard(device_index_);
  for (const auto& outbox : outboxes_) {
    if (outbox->has(capturing_)) outbox->communicator->before(stream_);
  }
  for (const auto& inbox : inboxes_) {
    if (inbox->has(capturing_)) inbox->communicator->before(stream_);
  }
  drop_captured();  // the stream uses their memory again after the links are done with it
}

// Events of a graph are never looked at.
void DeviceLinks::drop_captured() {
  for (const auto& outbox : outboxes_) {
    while (outbox->has(true)) outbox->in_flight.pop_back();
  }
  for (const auto& inbox : inboxes_) {
    while (inbox->has(true)) inbox->posted.pop_back();
  }
}

// -- sending -------------------------------------------------------------------------------------

void DeviceLinks::take_out(int destination, Message& message, const std::string& what) {
  const DeviceGuard guard(device_index_);
  Outbox& outbox = this->outbox(destination);
  std::string forms;
  std::vector<Slot> through_host;
  std::vector<at::Tensor> tensors;
  std::vector<Transfer> transfers;
  for (Slot& slot : message.slots) {
    Way way = !slot.tensor.defined()            ? Way::kNone
              : slot.tensor.device() == device_ ? Way::kDevice
                                                : Way::kHost;
    if (way == Way::kDevice) slot.tensor = for_sending(std::move(slot.tensor));
    append_slot_form(slot, way, forms);
    if (way == Way::kHost) through_host.push_back(std::move(slot));
    if (way != Way::kDevice || slot.tensor.nbytes() == 0) continue;
    transfers.push_back({memory_of(slot.tensor), slot.tensor.nbytes(), /*peer=*/1, true});
    tensors.push_back(std::move(slot.tensor));
  }
  std::string described;
  const bool is_new_each_time = message.key.kind == MessageKind::kResult;
  if (is_new_each_time) {
    outbox.descriptions.put_once(message.structure, described);
  } else {
    outbox.descriptions.put(message.structure, described);
  }
  outbox.descriptions.put(forms, described);
  message.structure = std::move(described);
  message.slots = std::move(through_host);
  if (transfers.empty()) return;
  PYDIST_CHECK(outbox.communicator != nullptr, Error, "rank ", rank_, " has no link to rank ",
               destination, " for ", what);
  std::deque<InFlight>& sent = outbox.in_flight;
  while (!sent.empty() && is_over(sent.front().done)) sent.pop_front();
  NcclCommunicator& communicator = *outbox.communicator;
  communicator.after(stream_);
  sent.push_back({OwnedEvent(), std::move(tensors), capturing_});
  moving(sent.back().tensors, [&] {
    communicator.exchange(transfers, what);
    sent.back().done.record(communicator.stream());
  });
  for (const Transfer& transfer : transfers) moved_nbytes_ += transfer.nbytes;
}

// -- receiving -----------------------------------------------------------------------------------

std::shared_ptr<DeviceLinks::Arrival> DeviceLinks::announce(int source, Message& message,
                                                            std::string what) {
  Inbox& inbox = this->inbox(source);
  const std::string described = std::move(message.structure);
  std::string_view rest = described;
  message.structure = std::string(inbox.descriptions.take(rest));
  auto arrival = std::make_shared<Arrival>();
  arrival->key = message.key;
  arrival->what = std::move(what);
  arrival->forms = std::string(inbox.descriptions.take(rest));
  std::vector<Slot> through_host = std::exchange(message.slots, {});
  auto host = through_host.begin();
  for (SlotForm& form : read_slot_forms(arrival->forms)) {
    const size_t index = message.slots.size();
    if (form.way == Way::kHost) {
      PYDIST_CHECK(host != through_host.end(), Error, "a peer sent too few tensors");
      message.slots.push_back(std::move(*host++));
      continue;
    }
    message.slots.push_back({at::Tensor(), form.requires_grad});
    if (form.way == Way::kDevice) arrival->places.emplace_back(index, std::move(form));
  }
  inbox.announced.push_back(arrival);
  return arrival;
}

void DeviceLinks::post() {
  for (const auto& inbox : inboxes_) {
    std::deque<std::shared_ptr<Arrival>>& posted = inbox->posted;
    while (!inbox->announced.empty()) {
      const DeviceGuard guard(device_index_);
      while (!posted.empty() && is_over(*posted.front()->done)) posted.pop_front();
      const std::shared_ptr<Arrival> arrival = inbox->announced.front();
      receive(*inbox, *arrival);
      inbox->announced.pop_front();
      if (arrival->done) posted.push_back(arrival);
    }
  }
}

namespace {

// In memory of torch's allocator, for the current stream; normal tensors in every mode.
template <class Places>
std::vector<at::Tensor> make_tensors(const Places& places, at::Device device) {
  const c10::InferenceMode normal(false);
  std::vector<at::Tensor> tensors;
  for (const auto& [slot, form] : places) {
    const auto options = at::TensorOptions(form.dtype).device(device);
    tensors.push_back(at::empty_strided(form.sizes, form.strides, options));
  }
  return tensors;
}

}  // namespace

void DeviceLinks::receive(Inbox& inbox, Arrival& arrival) {
  Inbox::Next* const next = inbox.find_next(arrival.key);
  const bool is_made = next != nullptr && next->forms == arrival.forms && !next->tensors.empty();
  arrival.tensors =
      is_made ? std::exchange(next->tensors, {}) : make_tensors(arrival.places, device_);
  std::vector<Transfer> transfers;
  for (const at::Tensor& tensor : arrival.tensors) {
    if (tensor.nbytes() == 0) continue;
    transfers.push_back({tensor.mutable_data_ptr(), tensor.nbytes(), /*peer=*/0, false});
  }
  if (transfers.empty()) return;
  PYDIST_CHECK(inbox.communicator != nullptr, Error, "rank ", rank_, " has no link for a message");
  NcclCommunicator& communicator = *inbox.communicator;
  if (is_made) {
    next->made.block(communicator.stream());
  } else {
    communicator.after(stream_);
  }
  OwnedEvent done;
  moving(arrival.tensors, [&] {
    communicator.exchange(transfers, arrival.what);
    done.record(communicator.stream());
  });
  arrival.captured = capturing_;
  arrival.done = std::move(done);
}

void DeviceLinks::hand_out(int source, Arrival& arrival, Message& message) {
  const DeviceGuard guard(device_index_);
  if (arrival.done) arrival.done->block(stream_);
  if (arrival.done && !has_graph_) prepare_next(inbox(source), arrival);
  for (size_t i = 0; i < arrival.places.size(); ++i) {
    message.slots[arrival.places[i].first].tensor = std::move(arrival.tensors[i]);
  }
  arrival.tensors.clear();
}

void DeviceLinks::prepare_next(Inbox& inbox, const Arrival& arrival) {
  if (arrival.key.kind == MessageKind::kResult) return;  // one a step
  Inbox::Next* next = inbox.find_next(arrival.key);
  if (next == nullptr) next = &inbox.next.emplace_back();
  if (next->forms == arrival.forms && !next->tensors.empty()) return;
  next->tensors.clear();  // before there are others
  next->key = arrival.key;
  next->forms = arrival.forms;
  next->stream = stream_;
  try {
    next->tensors = make_tensors(arrival.places, device_);
  } catch (const c10::OutOfMemoryError&) {  // then at the time
    return;
  }
  next->made.record(stream_);
}

}  // namespace pydist
